"""Mixins that give existing Ray actors the checkpoint-engine methods. Import them as ``twinkle_ray.mixins``."""

if __name__ != "twinkle_ray.mixins":
    raise ImportError(
        "import twinkle_ray.mixins, not mixins: a second import of the same file makes a second, different class"
    )

from twinkle_ray.mixins.rollout import RolloutActorMixin
from twinkle_ray.mixins.train import TrainActorMixin

__all__ = ["RolloutActorMixin", "TrainActorMixin"]
