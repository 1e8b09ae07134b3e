"""Models of the Hugging Face hub, through `huggingface_hub` (extra `hub`): its cache, its settings, its token.

A complete snapshot in the cache is used as it is, without a look at the network. Only JSON, chat templates and
safetensors are fetched, never code or pickles.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from xla_engine.errors import CheckpointError

_WANTED = ["*.json", "*.safetensors", "*.jinja"]
_UNWANTED = ["*/*.safetensors", "*/*.json", "consolidated*"]  # copies for other programs


def snapshot(name: str) -> Path:
    """The local directory of `OWNER/NAME[@REVISION]`. Raises CheckpointError."""
    repository, _, revision = name.partition("@")
    try:
        import huggingface_hub as hub
        from huggingface_hub import errors
    except ImportError as error:
        raise CheckpointError(
            f"{name}: no such directory; as an id of the Hugging Face hub it needs the huggingface_hub package. "
            "Install it: pip install 'xla-engine[hub]', or name a local directory"
        ) from error

    def fetch(**options: Any) -> Path:
        return Path(
            hub.snapshot_download(
                repository,
                revision=revision or None,
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED,
                **options,
            )
        )

    try:
        cached = fetch(local_files_only=True)
        if _complete(cached):
            return cached
    except errors.LocalEntryNotFoundError:
        pass
    try:
        if _complete(fetched := fetch()):
            return fetched
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{name}: the repository is gated. Accept its terms at https://huggingface.co/{repository}, then log in: "
            "hf auth login"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{name}: no such directory, and no such repository on the Hugging Face hub (or a private one). Correct "
            "the name, or log in: hf auth login"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(
            f"{name}: the repository has no revision {revision!r}. Name a branch, tag or commit"
        ) from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        raise CheckpointError(
            f"{name}: not in the local cache as a whole, and the hub cannot be reached or HF_HUB_OFFLINE is set. "
            f"Download it once where there is a network: hf download {repository}"
        ) from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        raise CheckpointError(f"{name}: cannot be downloaded ({error}). Try again later") from error
    raise CheckpointError(
        f"{fetched}: not all of {name}: either the repository has no complete safetensors weights (others are not "
        f"loaded), or the hub cannot be reached or HF_HUB_OFFLINE is set. Download it once: hf download {repository}"
    )


def _complete(directory: Path) -> bool:
    """Whether configuration and all weights are there; a download that was cut short leaves a part."""
    index = directory / "model.safetensors.index.json"
    try:
        shards = (
            set(json.loads(index.read_text())["weight_map"].values())
            if index.exists()
            else {"model.safetensors"}
        )
        return all((directory / str(file)).exists() for file in ("config.json", *shards))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return True  # reading the index will say what is broken
