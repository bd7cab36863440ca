"""Models whose weights are stored quantized: read as whole weights, or refused by name.

A model has `quantization_config` in its config.json, or in that file's part for text (transformers 5.19,
quantizers/auto.py: get_hf_quantizer).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from training.utils.base.console import log_on_main
from training.utils.base.errors import ThreestepError
from training.utils.loading.weight_files import StoredForm

_KEY = "quantization_config"
# Floats of 8 or 4 bits with their scales, which transformers makes whole weights of as it loads them.
_WHOLE = {"fp8": "FP8", "mxfp4": "MXFP4"}
_BITSANDBYTES = "bitsandbytes"


class QuantizedFolder(StoredForm):
    """Weights that a quantizer has rounded. Those in FP8 and MXFP4 are loaded as whole ones."""

    def check_entry(self, entry: Any, file: Path) -> None:
        """See `StoredForm.check_entry`."""
        if not isinstance(entry, dict):
            raise ThreestepError(
                f"'{file}': {_KEY} must be a JSON object that says how the weights were quantized, got {entry!r}; "
                "remove it if they are not quantized"
            )

    def check(self, config: Any, where: str) -> None:
        """ThreestepError unless transformers knows how the weights are quantized (`StoredForm.check`)."""
        given = _given(config)
        method = _method(given)
        if method not in _known():
            got = given.get("quant_method") if isinstance(given, dict) else given
            raise ThreestepError(
                f"'{where}': {_KEY} in its config.json needs a quant_method that is one of "
                f"{', '.join(sorted(_known()))}, got {got!r}; pass the original, unquantized model, or remove the "
                "entry if the weights are not quantized"
            )
        if method in _WHOLE:
            given["dequantize"] = True  # or a GPU would keep them as they are, frozen

    def check_trains(self, config: Any, where: str) -> None:
        """ThreestepError unless the weights are made whole, of which a line of the log then tells."""
        given = _given(config)
        method = _method(given)
        if method in _WHOLE:
            log_on_main(
                f"model: the weights of '{where}' are stored in {_WHOLE[method]} ({_KEY} in its config.json); they "
                "are dequantized to --dtype on loading, and saved models use that dtype"
            )
            return
        bits = instead = ""
        if method == _BITSANDBYTES:
            bits = f" to {4 if given.get('load_in_4bit') else 8} bits"
            instead = ", with LoRA and --load_in_4bit or --load_in_8bit to quantize it under the adapters"
        raise ThreestepError(
            f"'{where}': expected unquantized weights to train, but {method} has quantized them{bits} ({_KEY} in its "
            "config.json), and such weights can be neither trained nor saved as a complete model; pass the original, "
            f"unquantized model{instead}"
        )

    def is_read_whole(self, config: Any) -> bool:
        """See `StoredForm.is_read_whole`."""
        return _method(_given(config)) in _WHOLE

    def forget(self, config: Any) -> None:
        """See `StoredForm.forget`."""
        if not self.is_read_whole(config):
            return
        for part in (config, config.get_text_config()):
            if getattr(part, _KEY, None) is not None:
                delattr(part, _KEY)


def _given(config: Any) -> Any:
    for part in (config, config.get_text_config()):
        settings = getattr(part, _KEY, None)
        if settings is not None:
            return settings.to_dict() if hasattr(settings, "to_dict") else settings
    return None


def _known() -> set[str]:
    """The methods that the installed transformers reads."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    return {name.removesuffix("_4bit").removesuffix("_8bit") for name in AUTO_QUANTIZATION_CONFIG_MAPPING}


def _method(given: Any) -> str | None:
    """transformers' name of the method, without bitsandbytes' bits; None if there is none."""
    if not isinstance(given, dict):
        return None
    if given.get("load_in_4bit") or given.get("load_in_8bit"):  # older folders of bitsandbytes name no method
        return _BITSANDBYTES
    method = given.get("quant_method")
    return method if isinstance(method, str) else None
