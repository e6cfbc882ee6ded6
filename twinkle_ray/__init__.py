"""Weight sync from Ray trainer actors into live vLLM rollouts: bit-exact, bounded in time, at the speed of the wire.

Inherit :class:`twinkle_ray.mixins.TrainActorMixin` and :class:`twinkle_ray.mixins.RolloutActorMixin` in your actors and
drive them with :class:`CheckpointEngineManager`.
"""

from twinkle_ray.colocated import Placement
from twinkle_ray.errors import (
    BackendUnavailable,
    ConfigError,
    ManifestMismatch,
    PeerLost,
    ReplicaUnavailable,
    SyncAborted,
    SyncError,
    SyncTimeout,
    TwinkleRayError,
    UnsupportedActor,
    UnsupportedModel,
    VerifyError,
    WireError,
)
from twinkle_ray.manager import CheckpointEngineManager
from twinkle_ray.types import ReplicaReport, RolloutStatus, SyncReport, TrainerStatus, VerifyReport

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailable",
    "CheckpointEngineManager",
    "ConfigError",
    "ManifestMismatch",
    "PeerLost",
    "Placement",
    "ReplicaReport",
    "ReplicaUnavailable",
    "RolloutStatus",
    "SyncAborted",
    "SyncError",
    "SyncReport",
    "SyncTimeout",
    "TrainerStatus",
    "TwinkleRayError",
    "UnsupportedActor",
    "UnsupportedModel",
    "VerifyError",
    "VerifyReport",
    "WireError",
]
