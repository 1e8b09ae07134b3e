"""Architectures that are known and not supported: what each would need, and what runs instead."""

REFUSED = {
    "Phi4FlashForCausalLM": ("Mamba layers and layers that share keys", "Phi-4-mini"),
    **dict.fromkeys(
        ("DeepseekOCRForCausalLM", "DeepseekOCR2ForCausalLM", "DeepseekOcr2ForConditionalGeneration"),
        ("two vision towers, one behind the other", "PaddleOCR-VL or GLM-OCR"),
    ),
    "GraniteDoclingForConditionalGeneration": (
        "features of early layers at two resolutions",
        "Granite-Docling 258M, PaddleOCR-VL or GLM-OCR",
    ),
}


def why_refused(architecture: str) -> str | None:
    """Why a known architecture does not run, and what does; None for others."""
    if architecture not in REFUSED:
        return None
    needs, instead = REFUSED[architecture]
    return f"not supported: it needs {needs}. Use {instead}"
