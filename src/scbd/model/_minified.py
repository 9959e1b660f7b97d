"""Minified tables, which hold embeddings in place of inputs as in scvi-tools: creating and reading them."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
from anndata import AnnData
from scvi.data._constants import _ADATA_MINIFY_TYPE_UNS_KEY, _MANAGER_UUID_KEY, _SCVI_UUID_KEY
from scvi.data._utils import _get_adata_minify_type
from torch import nn

from scbd.data._input_location import InputLocation
from scbd.model._training_cells import cell_digests

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from scbd.data._sources import ImageSource
    from scbd.model._interfaces import BlockName, EmbeddingModule
    from scbd.nn._encoders import Representation
    from scbd.nn._environment_scaling import EnvironmentScaling

# kind of a minified table, in the entry of uns where scvi-tools states it; the kinds of scvi-tools hold posteriors
_MINIFIED_KIND = "embeddings"
# key of uns for the digests of the inputs, embeddings and weights that a minified table was created from
_DIGESTS_KEY = "_scbd_minified"
# key of obsm for the uncentred embeddings of all blocks, concatenated
_EMBEDDINGS_KEY = "_scbd_latent"
_STORED = InputLocation(obsm_key=_EMBEDDINGS_KEY)


class StoredEmbeddings(nn.Module):
    """Replacement for a module that reads stored embeddings of a minified table, the blocks concatenated."""

    def __init__(self, module: EmbeddingModule) -> None:
        super().__init__()
        self.device: torch.device = module.device
        self.widths = {block: module.width(block, "embedding") for block in block_names(module)}

    def width(self, block: BlockName, representation: Representation) -> int:
        """Return the dimension of the embedding of a block."""
        return self.widths[block]

    def embed(
        self,
        inputs: Tensor,
        block: BlockName,
        representation: Representation,
        e: Tensor | None = None,
        environments: EnvironmentScaling | None = None,
    ) -> Tensor:
        """Return the stored embedding of a block, ``(B, D)``, which :meth:`EmbeddingModule.embed` computed.

        Parameters
        ----------
        inputs
            Stored embeddings of all blocks, concatenated.
        block
            ``"c"`` for z_c, or ``"s"`` for z_s.
        representation, e, environments
            Ignored; they exist for the same signature as :meth:`EmbeddingModule.embed`.
        """
        first = 0 if block == "c" else self.widths["c"]
        return inputs[:, first : first + self.widths[block]]


def block_names(module: EmbeddingModule) -> list[BlockName]:
    """Return the names of a module's blocks."""
    return ["c"] if module.style is None else ["c", "s"]


def is_minified(adata: AnnData) -> bool:
    """Return whether a table was created by :func:`minified_copy`."""
    return bool(_get_adata_minify_type(adata) == _MINIFIED_KIND)


def minified_copy(adata: AnnData, inputs: InputLocation, module: EmbeddingModule, z: np.ndarray) -> AnnData:
    """Return a copy of a table with embeddings in place of inputs, X and layers.

    Parameters
    ----------
    adata
        Table of cells with inputs.
    inputs
        Place of the inputs in the table.
    module
        Module that computed the embeddings.
    z
        Embeddings of all blocks, concatenated, float32 ``(N, D)``.
    """
    uns = {key: value for key, value in adata.uns.items() if key not in (_SCVI_UUID_KEY, _MANAGER_UUID_KEY)}
    left_out = (inputs.image_key, inputs.obsm_key)
    obsm = {key: values for key, values in adata.obsm.items() if key not in left_out}
    table = AnnData(obs=adata.obs, var=adata.var, uns=uns, obsm=obsm | {_EMBEDDINGS_KEY: z}, obsp=dict(adata.obsp))
    digests = {
        "inputs": _digest(adata, inputs),
        "embeddings": _digest(table, _STORED),
        "weights": _digest_weights(module),
    }
    table.uns |= {_ADATA_MINIFY_TYPE_UNS_KEY: _MINIFIED_KIND, _DIGESTS_KEY: digests}
    return table


def missing_inputs_message(inputs: str) -> str:
    """Return the error message for a minified table where inputs are needed; ``inputs`` names these inputs."""
    return (
        f"These cells are minified: embeddings stand in place of {inputs}, which this needs. Pass the full table, or "
        "attach it with model.adata = …"
    )


def stored_embeddings(adata: AnnData, module: EmbeddingModule) -> ImageSource:
    """Return the source of the embeddings that a minified table holds in place of inputs.

    Raises
    ------
    ValueError
        If the table lacks embeddings, or its embeddings were computed with other weights.
    """
    if _EMBEDDINGS_KEY not in adata.obsm or adata.uns[_DIGESTS_KEY]["weights"] != _digest_weights(module):
        msg = (
            "These cells are minified, and hold embeddings of another model, or of this one before it was trained on: "
            "attach the full table, and call minify_adata() again."
        )
        raise ValueError(msg)
    return _STORED.source(adata)


def digest_of_inputs(adata: AnnData) -> str:
    """Return the digest of the inputs from which the embeddings of a minified table were computed.

    It is empty if the embeddings have changed since, for example because rows were selected.
    """
    of = adata.uns[_DIGESTS_KEY]
    return str(of["inputs"]) if of["embeddings"] == _digest(adata, _STORED) else ""


def _digest(adata: AnnData, inputs: InputLocation) -> str:
    return cell_digests(inputs.source(adata), adata.obs[[]])["images"]


def _digest_weights(module: EmbeddingModule) -> str:
    """Return a digest of the preprocessing and the networks, on which embeddings depend."""
    digest = hashlib.sha256()
    for part in filter(None, (module.preprocess, module.content, module.style)):
        for name, tensor in part.state_dict().items():
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(tensor.detach().cpu().float().numpy()).tobytes())
    return digest.hexdigest()
