"""Model folders made on the spot."""

from tests.support.saved_models import save_model

__all__ = ["save_model"]
