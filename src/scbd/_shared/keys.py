"""Names under which the package reads and writes data: keys of AnnData's ``obs`` and ``obsm``, and of scvi-tools."""

from __future__ import annotations

# default obsm key of the images of cells (N, C, H, W); scPortrait and annbatch's image tutorial use the same key
IMAGE_KEY = "single_cell_images"

# obsm key of the embedding z_c (content)
CONTENT_KEY = "X_scbd_c"
# obsm key of the embedding z_s (style)
STYLE_KEY = "X_scbd_s"

# obsm key of the principal components of the pixels of images
PIXEL_PCA_KEY = "X_pixel_pca"
# obsm key of the principal components of features
FEATURE_PCA_KEY = "X_feature_pca"

# obsm key under which scbd.run stores the best of the embeddings that it compares
BEST_KEY = "X_scbd_best"

# obs column in which scbd.run stores for each cell whether it is a "train", "validation" or "test" cell of the split,
# or in no part of the split (the value NOT_IN_SPLIT)
SPLIT_KEY = "scbd_split"
# obs column in which scbd.cross_fit stores the fold of each cell; each fold has its own model, which embedded the cell
FOLD_KEY = "scbd_fold"
# value in the obs column SPLIT_KEY for cells that are neither training, validation nor test cells
NOT_IN_SPLIT = "left out"

# arguments of SCBDModel.train with which users split the cells themselves
SPLIT_ARGUMENTS = ("split", "train_size", "validation_size")

# The following keys name the inputs and labels of a model in its scvi-tools registry, which records where each of them
# is stored in the AnnData.

# registry key of the images
IMAGE_REGISTRY = "image"
# registry key of the features
FEATURE_REGISTRY = "features"
# registry key of the position of cells on the plate
POSITION_REGISTRY = "position"
# registry key of the perturbation label
Y_REGISTRY = "y"
# registry key of the environment label
E_REGISTRY = "e"
