"""Where things live in an AnnData: the defaults every part of the package agrees on."""

from __future__ import annotations

# obsm: images as N x C x H x W, the convention of scPortrait and of annbatch's image tutorial
IMAGE_KEY = "single_cell_images"

# obsm: embeddings, one per block
CONTENT_KEY = "X_scbd_c"
STYLE_KEY = "X_scbd_s"

# obs, of what a run writes: the part of the split that a cell is in, whether its perturbation was trained on, and the
# first component of the z_c that this holds for
SPLIT_KEY = "scbd_split"
SEEN_KEY = "scbd_seen"
SEEN_OF_KEY = "scbd_seen_of"
# what the column of the split says of cells that are in no part
LEFT_OUT = "left out"

# the keys under which a model's registry holds its inputs: images or features, labels, numbers, positions
IMAGE_REGISTRY = "image"
FEATURE_REGISTRY = "features"
POSITION_REGISTRY = "position"
NUMBER_REGISTRY = "numbers"
Y_REGISTRY = "y"
E_REGISTRY = "e"
