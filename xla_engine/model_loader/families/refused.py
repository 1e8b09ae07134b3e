"""Architectures that are known and not supported: what each would need, and what runs instead."""

REFUSED = {
    "Phi4FlashForCausalLM": ("Mamba layers and layers that share keys", "Phi-4-mini"),
    "DeepseekOCRForCausalLM": ("CLIP's vision tower behind that of SAM", "DeepSeek-OCR-2"),
    "GraniteDoclingForConditionalGeneration": (
        "features of early layers at two resolutions",
        "Granite-Docling 258M, PaddleOCR-VL, GLM-OCR or DeepSeek-OCR-2",
    ),
}


def why_refused(architecture: str) -> str | None:
    """Why a known architecture does not run, and what does; None for others."""
    if architecture not in REFUSED:
        return None
    needs, instead = REFUSED[architecture]
    return f"not supported: it needs {needs}. Use {instead}"
