"""Crops of what spatialdata itself has written."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData

from scbd.data import from_spatialdata, write_screen

pytest.importorskip("spatialdata", reason="spatialdata is not installed")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from spatialdata import SpatialData, read_zarr
    from spatialdata.models import Image2DModel, Labels2DModel, PointsModel, ShapesModel, TableModel
    from spatialdata.transformations import Affine, Identity, Scale, Sequence, Translation

pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages; what is ours is asked for by name
SIZE, SIDE, N = 15, 800, 1000
TURN = np.deg2rad(30)
TURNED = Affine(
    [[np.cos(TURN), -np.sin(TURN), 7], [np.sin(TURN), np.cos(TURN), -40], [0, 0, 1]], ("x", "y"), ("x", "y")
)
OF_IMAGE = {
    "identity": Identity(),
    "scale": Scale([0.5, 0.325], ("x", "y")),
    "translation": Translation([-300.5, 1000.25], ("x", "y")),
    "scale and translation": Sequence([Scale([0.65, 0.65], ("x", "y")), Translation([55, -8], ("x", "y"))]),
    "turned": Sequence([Scale([2, 2], ("x", "y")), TURNED]),
}


def nuclei() -> np.ndarray:
    """Row and column of each: on a grid, so that no two share a crop, in no order."""
    rng = np.random.default_rng(0)
    places = np.stack(np.meshgrid(np.arange(40), np.arange(40), indexing="ij"), axis=-1).reshape(-1, 2)
    return rng.permutation(places * 19 + 20)[:N]


def picture(yx: np.ndarray, dtype: str = "uint16") -> np.ndarray:
    """Each nucleus one pixel, as bright as its number."""
    image = np.zeros((SIDE, SIDE), dtype)
    image[tuple(yx.T)] = np.arange(1, len(yx) + 1)
    return image


def in_system(yx: np.ndarray, transformation: Any) -> np.ndarray:
    """The middle of each pixel, as x and y of the coordinate system."""
    xy = np.column_stack([yx[:, ::-1] + 0.5, np.ones(len(yx))])
    return (xy @ transformation.to_affine_matrix(("x", "y"), ("x", "y")).T)[:, :2]


def annotation(instances: Any, region: str = "cells") -> Any:
    n = len(instances)
    obs = pd.DataFrame(
        {
            "region": pd.Categorical([region] * n),
            "instance_id": instances,
            "gene": [f"gene_{i % 3}" for i in range(n)],
            "number": np.arange(1, n + 1),
        },
        index=[f"cell_{i}" for i in range(n)],
    )
    return TableModel.parse(AnnData(obs=obs), region=region, region_key="region", instance_key="instance_id")


def written(tmp_path: Any, **elements: Any) -> Any:
    """Written and read again; images of one scale are not, which spatialdata 0.7.2 cannot write with ome-zarr 0.18."""
    sdata, path = SpatialData(**elements), tmp_path / "well.zarr"
    if not all(hasattr(one, "children") for kind in (sdata.images, sdata.labels) for one in kind.values()):
        return sdata
    sdata.write(path)
    return read_zarr(path)


def centred(crops: Any) -> int:
    """How many crops have their own nucleus, and no other, as their centre pixel."""
    images = crops.images.read(slice(None))[:, 0]
    return int(((images > 0).sum(axis=(1, 2)) == 1)[images[:, SIZE // 2, SIZE // 2] == crops.obs["number"]].sum())


@pytest.mark.parametrize("multiscale", [False, True])
@pytest.mark.parametrize("name", OF_IMAGE)
def test_every_nucleus_is_in_the_middle_of_its_crop(name, multiscale, tmp_path):
    yx, transformation = nuclei(), OF_IMAGE[name]
    image = Image2DModel.parse(
        np.stack([picture(yx)] * 2),
        dims=("c", "y", "x"),
        c_coords=["DNA", "actin"],
        scale_factors=[2, 2] if multiscale else None,
        transformations={"global": transformation},
    )
    # cells lie in a system of their own, too
    own = Scale([3.0, 0.1], ("x", "y"))
    shapes = ShapesModel.parse(
        in_system(yx, transformation) / [3.0, 0.1], geometry=0, radius=2.0, transformations={"global": own}
    )
    points = PointsModel.parse(in_system(yx, transformation))
    tables = {"shapes": annotation(np.arange(N), "cells"), "points": annotation(np.arange(N), "spots")}
    sdata = written(
        tmp_path, images={"image": image}, shapes={"cells": shapes}, points={"spots": points}, tables=tables
    )
    for cells in ("cells", "spots"):
        crops = from_spatialdata(sdata, "image", cells, size=SIZE)
        assert crops.channels == ["DNA", "actin"]
        assert (centred(crops), len(crops.obs)) == (N, N)
        np.testing.assert_allclose(crops.obs[["y", "x"]].to_numpy(), yx[crops.obs["number"] - 1], atol=1e-6)


@pytest.mark.parametrize("multiscale", [False, True])
def test_labels_of_another_scale_than_the_image(multiscale, tmp_path):
    """Segmented at half the resolution: pixels of labels are four of the image's."""
    yx = nuclei() // 2 * 2
    labels = np.zeros((SIDE // 2, SIDE // 2), "int32")
    labels[tuple(yx.T // 2)] = np.arange(1, N + 1)
    sdata = written(
        tmp_path,
        images={"image": Image2DModel.parse(picture(yx)[None], dims=("c", "y", "x"))},
        labels={
            "nuclei": Labels2DModel.parse(
                labels,
                dims=("y", "x"),
                scale_factors=[2] if multiscale else None,
                transformations={"global": Scale([2, 2], ("x", "y"))},
            )
        },
        tables={"table": annotation(np.arange(1, N + 1), "nuclei")},
    )
    crops = from_spatialdata(sdata, "image", "nuclei", size=SIZE)
    # the middle of a large pixel is the corner of four, of which one is the nucleus
    assert (crops.obs[["y", "x"]].to_numpy() - yx[crops.obs["number"] - 1] == 0.5).all()
    assert crops.channels == ["channel_0"]
    with pytest.raises(ValueError, match="the cells of image are no labels that have the pixels"):
        from_spatialdata(sdata, "image", "nuclei", size=SIZE, mask="neighbours")


def test_neighbours_are_masked_and_the_table_is_joined(tmp_path):
    rng = np.random.default_rng(0)
    image = rng.integers(1, 99, (2, 60, 60)).astype("uint8")
    labels = np.zeros((60, 60), "int32")
    labels[20:30, 20:30], labels[20:30, 30:40], labels[45:50, 45:50] = 5, 9, 2
    table = annotation([9, 5])
    table.obs["region"] = pd.Categorical(["nuclei"] * 2)
    table.uns["spatialdata_attrs"]["region"] = "nuclei"
    scale = {"global": Scale([0.5, 0.5], ("x", "y"))}
    sdata = written(
        tmp_path,
        images={"image": Image2DModel.parse(image, dims=("c", "y", "x"), scale_factors=[2], transformations=scale)},
        labels={"nuclei": Labels2DModel.parse(labels, dims=("y", "x"), scale_factors=[2], transformations=scale)},
        tables={"table": table},
    )
    with pytest.warns(UserWarning, match="1 of 3 cells of 'nuclei' have no row in their table: they are left out"):
        crops = from_spatialdata(sdata, "image", "nuclei", size=21, mask="neighbours")
    assert crops.obs["gene"].tolist() == ["gene_1", "gene_0"] and crops.obs.index.tolist() == ["cell_1", "cell_0"]
    assert crops.obs["instance"].tolist() == [5, 9]
    first = crops.images.read(slice(0, 1))[0]
    own = labels[15:36, 15:36]
    np.testing.assert_array_equal(first, image[:, 15:36, 15:36] * np.isin(own, [0, 5]))
    screen = write_screen(tmp_path / "screen.h5ad", crops, y_key="gene")
    assert set(screen.obs["number"]) == {1, 2}


@pytest.fixture
def two(tmp_path) -> Any:
    """Two fields, of which the second has finer pixels."""
    yx = nuclei()[:50]
    images, shapes = {}, {}
    for number, pixel in enumerate((1.0, 0.5)):
        scale = Scale([pixel, pixel], ("x", "y"))
        images[f"field_{number}"] = Image2DModel.parse(
            picture(yx)[None] * 100, dims=("c", "y", "x"), transformations={"global": scale}
        )
        shapes[f"cells_{number}"] = ShapesModel.parse(in_system(yx, scale), geometry=0, radius=1.0)
    return written(tmp_path, images=images, shapes=shapes)


def test_several_images(two):
    names = ["field_0", "field_1"], ["cells_0", "cells_1"]
    with pytest.raises(ValueError, match=r"Pixels of field 'field_1' are 0\.5 .* resample_to=1"):
        from_spatialdata(two, *names, size=SIZE)
    crops = from_spatialdata(two, *names, size=SIZE, resample_to=1.0)
    assert crops.obs["field"].value_counts().tolist() == [50, 50]
    images = crops.images.read(slice(None))[:, 0]
    assert (images.reshape(100, -1).argmax(axis=1) == SIZE * SIZE // 2).all()


@pytest.mark.parametrize(
    ("images", "cells", "how", "message"),
    [
        ("field_2", "cells_0", {}, "images has no 'field_2' .* Did you mean 'field_"),
        ("field_0", "cell", {}, "shapes and points and labels has no 'cell'"),
        (["field_0"], ["cells_0", "cells_1"], {}, "1 images and 2 elements with cells"),
        (["field_0", "field_0"], ["cells_0", "cells_1"], {}, "give each once"),
        ("field_0", "cells_0", {"table": "annotations"}, "What annotates 'cells_0' has no 'annotations'"),
        ("field_0", "cells_0", {"coordinate_system": "well"}, "in common the coordinate systems global: name one"),
        ("field_0", "cells_0", {"channels": ["DNA"]}, "no 'DNA'"),
    ],
)
def test_what_does_not_fit_is_said(two, images, cells, how, message):
    with pytest.raises((KeyError, ValueError), match=message):
        from_spatialdata(two, images, cells, size=SIZE, **how)


def test_a_table_of_other_cells_is_said(two):
    two.tables["table"] = annotation([f"cell_{i}" for i in range(5)], "cells_0")
    with pytest.raises(ValueError, match="has none of the cells of 'cells_0': are instances alike"):
        from_spatialdata(two, "field_0", "cells_0", size=SIZE)
