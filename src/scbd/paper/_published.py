"""The paper's numbers, to stand beside ours: test accuracy in %, mean ± sd (Makino et al., 2025)."""

from __future__ import annotations

# table 1, ten seeds; by data set, then system
TABLE_1 = {
    "colored_mnist": {
        "SCBD, alpha 0": "25.5 ± 3.0",
        "SCBD, alpha 192": "82.9 ± 12.1",
        "ERM": "37.8 ± 2.6",
        "CORAL": "37.6 ± 3.6",
        "DANN": "39.0 ± 4.5",
        "IRM": "37.0 ± 4.2",
        "Fish": "48.2 ± 3.5",
        "Group DRO": "35.0 ± 2.9",
        "iVAE": "52.1 ± 37.6",
    },
    "camelyon17": {
        "SCBD, alpha 0": "61.9 ± 3.8",
        "SCBD, alpha 192": "72.7 ± 3.0",
        "ERM": "65.8 ± 4.9",
        "CORAL": "59.5 ± 7.7",
        "DANN": "55.2 ± 6.7",
        "IRM": "66.3 ± 2.1",
        "Fish": "49.1 ± 0.9",
        "Group DRO": "68.4 ± 7.3",
        "iVAE": "52.0 ± 2.0",
    },
}

# appendix, three seeds; by test environment
_APPENDIX = ("SCBD, alpha 0", "ERM", "CORAL", "DANN", "IRM", "Group DRO")
_BY_ENVIRONMENT = {
    "art_painting": ("86.6 ± 2.1", "88.1 ± 0.1", "87.7 ± 0.6", "85.9 ± 0.5", "85.0 ± 1.6", "86.4 ± 0.3"),
    "cartoon": ("81.3 ± 1.9", "77.9 ± 1.3", "79.2 ± 1.1", "79.9 ± 1.4", "77.6 ± 0.9", "79.9 ± 0.8"),
    "photo": ("97.0 ± 0.8", "97.8 ± 0.0", "97.6 ± 0.0", "97.6 ± 0.2", "96.7 ± 0.3", "98.0 ± 0.3"),
    "sketch": ("70.6 ± 4.9", "79.1 ± 0.9", "79.4 ± 0.7", "75.2 ± 2.8", "78.5 ± 2.6", "72.1 ± 0.7"),
    "Caltech101": ("94.7 ± 1.8", "97.6 ± 1.0", "98.8 ± 0.1", "98.5 ± 0.2", "97.6 ± 0.3", "97.7 ± 0.4"),
    "LabelMe": ("67.1 ± 1.3", "63.3 ± 0.9", "64.6 ± 0.8", "64.9 ± 1.1", "65.0 ± 0.9", "62.5 ± 1.1"),
    "SUN09": ("74.7 ± 3.0", "72.2 ± 0.5", "71.7 ± 1.4", "73.1 ± 0.7", "72.2 ± 0.5", "70.1 ± 0.7"),
    "VOC2007": ("71.4 ± 1.3", "76.4 ± 1.5", "75.8 ± 0.4", "78.3 ± 0.3", "76.4 ± 1.5", "78.4 ± 0.9"),
}


def published_of(dataset: str, environment: str = "") -> dict[str, str]:
    """By the names of rows; where forms of SCBD are told apart, the paper's is the listing."""
    numbers = _BY_ENVIRONMENT.get(environment)
    found = TABLE_1.get(dataset, {}) if numbers is None else dict(zip(_APPENDIX, numbers, strict=True))
    return found | {name.replace("SCBD", "listing"): number for name, number in found.items()}
