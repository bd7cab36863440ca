"""`--kept_image_features_mb` in step 3: the features of a picture are made once for the models whose vision tower has
the same weights, and for all their forwards: the rollout's prompts, the reading of a rollout, and its updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from training.utils.images.run.row_images import why_not_kept, with_kept_features

if TYPE_CHECKING:
    from training.step3_ppo.roles.roles import Roles
    from training.utils.images.models.pictured import RowImages


def with_kept_pictures(
    images: RowImages | None, most_mb: int, roles: Roles, log: Callable[..., None]
) -> RowImages | None:
    """Return the images with up to `most_mb` MiB of the actor's features stored; the other models read them if they
    can, which is logged, and pixels if not. ThreestepError if the actor cannot."""
    if not most_mb or images is None:
        return images
    device, is_main, models = roles.actor.ranks.device, roles.actor.ranks.is_main, roles.readers
    with roles.reading():
        stored = with_kept_features(images, most_mb, roles.actor_model, roles.actor, models["actor"][1], evicts=True)
        assert stored is not None
        readers = ["actor"]
        for name in [name for name in ("reference", "critic", "reward model") if name in models]:
            model, read = models[name]
            reason = why_not_kept(stored, model, read, device, roles.actor_model)
            if reason is None:
                readers.append(name)
            else:
                log(f"the {name} reads pixels, and no features that are kept: {reason}", is_main)
    log(f"the features of up to {most_mb} MiB of pictures are kept for: {', '.join(readers)}", is_main)
    return stored
