"""Keys of ``obs``, ``obsm`` and the scvi-tools registry that the package reads and writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass

# obsm key of the images (N, C, H, W), as in scPortrait and in annbatch's image tutorial
IMAGE_KEY = "single_cell_images"

# obsm keys of the embeddings z_c (content) and z_s (style)
CONTENT_KEY = "X_scbd_c"
STYLE_KEY = "X_scbd_s"

# obsm keys of the principal components of the inputs: pixels of images, or features
PIXEL_PCA_KEY = "X_pixel_pca"
FEATURE_PCA_KEY = "X_feature_pca"

# obsm key under which scbd.run stores the best of the embeddings that it compares
BEST_KEY = "X_scbd_best"

# obs column in which scbd.run stores the part of the split of each cell: train, validation, test or LEFT_OUT
SPLIT_KEY = "scbd_split"
# obs column in which scbd.cross_fit stores the fold of each cell, that is, the model that embedded it
FOLD_KEY = "scbd_fold"
# value of SPLIT_KEY for cells that are in no part of the split
NOT_IN_SPLIT = "left out"

# keys of a model's scvi-tools registry: images, features, position on the plate, continuous covariates ("numbers"),
# perturbation (y) and environment (e)
IMAGE_REGISTRY = "image"
FEATURE_REGISTRY = "features"
POSITION_REGISTRY = "position"
COVARIATE_REGISTRY = "numbers"
Y_REGISTRY = "y"
E_REGISTRY = "e"
