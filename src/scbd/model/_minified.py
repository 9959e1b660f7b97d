"""Creating and reading minified tables of cells, in which embeddings replace images or features, as in scvi-tools."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
from anndata import AnnData
from scvi.data._constants import _ADATA_MINIFY_TYPE_UNS_KEY, _MANAGER_UUID_KEY, _SCVI_UUID_KEY
from scvi.data._utils import _get_adata_minify_type
from torch import nn

from scbd.data._input_location import InputLocation
from scbd.data._sources import digest_inputs

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch import Tensor

    from scbd.data._sources import ImageSource
    from scbd.model._interfaces import BlockName, EmbeddingModule
    from scbd.nn._encoders import Representation
    from scbd.nn._environment_scaling import EnvironmentScaling

# value that marks a table as minified by scbd, in the entry of uns in which scvi-tools states the kind of a minified
# table; the kinds of scvi-tools hold posterior distributions, not embeddings
_MINIFIED_KIND = "embeddings"
# key of uns for the digests (hashes) of the inputs, the embeddings and the network weights from which a minified table
# was created
_DIGESTS_KEY = "_scbd_minified"
# key of obsm for the embeddings in a minified table: z_c and, if the model has it, z_s, concatenated and without
# centring
_EMBEDDINGS_KEY = "_scbd_latent"
_STORED = InputLocation(obsm_key=_EMBEDDINGS_KEY)


class StoredEmbeddings(nn.Module):
    """Replacement for a model's network that returns the embeddings stored in a minified table.

    The inputs of this replacement are rows of the table's embeddings, in which z_c and z_s are concatenated.
    """

    def __init__(self, module: EmbeddingModule) -> None:
        super().__init__()
        self.device: torch.device = module.device
        self.widths = {block: module.width(block, "embedding") for block in block_names(module)}

    def width(self, block: BlockName, representation: Representation) -> int:
        """Return the dimension of z_c (``block="c"``) or z_s (``"s"``); ``representation`` is ignored."""
        return self.widths[block]

    def embed(
        self,
        inputs: Tensor,
        block: BlockName,
        representation: Representation,
        e: Tensor | None = None,
        environments: EnvironmentScaling | None = None,
    ) -> Tensor:
        """Return the stored z_c or z_s of cells, ``(B, D)``, computed by :meth:`EmbeddingModule.embed` on minification.

        Parameters
        ----------
        inputs
            Stored embeddings of the cells, z_c and z_s concatenated.
        block
            ``"c"`` for z_c, or ``"s"`` for z_s.
        representation, e, environments
            Ignored. These parameters make the signature equal to that of :meth:`EmbeddingModule.embed`.
        """
        first = 0 if block == "c" else self.widths["c"]
        return inputs[:, first : first + self.widths[block]]


def block_names(module: EmbeddingModule) -> list[BlockName]:
    """Return the names of the embeddings (blocks) that a module computes: ``"c"`` for z_c, and ``"s"`` for z_s."""
    return ["c"] if module.style is None else ["c", "s"]


def is_minified(adata: AnnData) -> bool:
    """Return whether a table of cells was created by :func:`minified_copy`, with embeddings in place of inputs."""
    return bool(_get_adata_minify_type(adata) == _MINIFIED_KIND)


def minified_copy(adata: AnnData, inputs: InputLocation, module: EmbeddingModule, z: np.ndarray) -> AnnData:
    """Return a minified copy of a table of cells: embeddings replace the images or features, ``X`` and the layers.

    Parameters
    ----------
    adata
        Table of cells with images or features.
    inputs
        Location of the images or features in the table.
    module
        Module that computed the embeddings.
    z
        Embeddings, float32 ``(N, D)``: z_c and, if the model has it, z_s, concatenated.
    """
    uns = {key: value for key, value in adata.uns.items() if key not in (_SCVI_UUID_KEY, _MANAGER_UUID_KEY)}
    left_out = (inputs.image_key, inputs.obsm_key)
    obsm = {key: values for key, values in adata.obsm.items() if key not in left_out}
    table = AnnData(obs=adata.obs, var=adata.var, uns=uns, obsm=obsm | {_EMBEDDINGS_KEY: z}, obsp=dict(adata.obsp))
    digests = {
        "inputs": digest_inputs(inputs.source(adata)),
        "embeddings": digest_inputs(_STORED.source(table)),
        "weights": _digest_of_embedding_weights(module),
    }
    table.uns |= {_ADATA_MINIFY_TYPE_UNS_KEY: _MINIFIED_KIND, _DIGESTS_KEY: digests}
    return table


def missing_inputs_message(inputs: str) -> str:
    """Return the error message for a call that needs images or features, given a minified table without them.

    ``inputs`` names the location of the missing images or features.
    """
    return (
        f"These cells are minified: embeddings stand in place of {inputs}, which this needs. Pass the full table, or "
        "attach it with model.adata = …"
    )


def stored_embeddings(adata: AnnData, module: EmbeddingModule) -> ImageSource:
    """Return an object that reads the embeddings stored in a minified table, by row numbers.

    Raises
    ------
    ValueError
        If the table lacks embeddings, or its embeddings were computed with weights that differ from those of
        ``module``.
    """
    if _EMBEDDINGS_KEY not in adata.obsm or adata.uns[_DIGESTS_KEY]["weights"] != _digest_of_embedding_weights(module):
        msg = (
            "These cells are minified, and hold embeddings of another model, or of this one before it was trained on: "
            "attach the full table, and call minify_adata() again."
        )
        raise ValueError(msg)
    return _STORED.source(adata)


def digest_of_original_inputs(adata: AnnData) -> str:
    """Return the digest (hash) of the images or features from which the embeddings of a minified table were computed.

    The digest is an empty text if the stored embeddings have changed since, for example because rows were selected.
    """
    of = adata.uns[_DIGESTS_KEY]
    return str(of["inputs"]) if of["embeddings"] == digest_inputs(_STORED.source(adata)) else ""


def _digest_of_embedding_weights(module: EmbeddingModule) -> str:
    """Return a digest (hash) of all weights and statistics on which embeddings depend: preprocessing and encoders."""
    digest = hashlib.sha256()
    update_with_weights(digest, filter(None, (module.preprocess, module.content, module.style)))
    return digest.hexdigest()


def update_with_weights(digest: hashlib._Hash, parts: Iterable[nn.Module]) -> None:
    """Add the names and values of all parameters and buffers of some networks to a digest (hash)."""
    for part in parts:
        for name, tensor in part.state_dict().items():
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(tensor.detach().cpu().float().numpy()).tobytes())
