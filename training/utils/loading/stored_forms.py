"""Forms in which a model's files may hold its weights other than whole. Plugins read them, by the field of its
configuration that says so (`stored_forms` of `Plugin.tables`); without one such a model is refused. Cheap to import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from training.utils.base.errors import ThreestepError
from training.utils.base.user_files import named_object
from training.utils.plugins.registry import added, missing, missing_plugin

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class StoredForm:
    """A form of stored weights. config: a model's, or one that `check` has seen, which has the field in itself or in
    its part for text."""

    def check_entry(self, entry: Any, file: Path) -> None:
        """ThreestepError for a field of a config.json that is no such thing; before any library is imported."""

    def check(self, config: Any, where: str) -> None:
        """ThreestepError unless the weights can be read; otherwise prepare the configuration for it, in place.

        where: the model's folder or hub name
        """

    def check_trains(self, config: Any, where: str) -> None:
        """ThreestepError if the weights cannot be trained as they are read."""

    def is_read_whole(self, config: Any) -> bool:
        """True if the weights are whole ones once the model is loaded."""
        raise NotImplementedError

    def forget(self, config: Any) -> None:
        """Remove what says so from the configuration of a model that was loaded, if its weights are whole now."""


class WholeWeights(StoredForm):
    """The form of a model whose configuration names none."""

    def is_read_whole(self, config: Any) -> bool:
        """Always."""
        return True


def stored_form(config: Any) -> StoredForm:
    """Return the form in which a model's files hold its weights."""
    places = (place for field, place in added("stored_forms", ()).items() if _has(config, field))
    form: type[StoredForm] = next(map(named_object, places), WholeWeights)
    return form()


def check_entries(config: Mapping[str, Any], file: Path) -> None:
    """ThreestepError for fields of a config.json that name a form of stored weights and are mistaken."""
    for field, place in added("stored_forms", ()).items():
        if config.get(field) is not None:
            named_object(place)().check_entry(config[field], file)


def check_form(config: Any, where: str) -> None:
    """ThreestepError unless the weights can be read as they are stored (`StoredForm.check`)."""
    for field in missing("stored_forms"):
        if _has(config, field):
            raise ThreestepError(
                f"'{where}' has {field} in its config.json, so that its weights are not stored whole; "
                f"{missing_plugin('stored_forms', field)}"
            )
    stored_form(config).check(config, where)


def _has(config: Any, field: str) -> bool:
    return any(getattr(part, field, None) is not None for part in (config, config.get_text_config()))
