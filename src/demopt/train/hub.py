"""--push-to-hub: uploads the model folder to the Hugging Face hub when all else is done."""

from __future__ import annotations

import shlex

from demopt.errors import one_line
from demopt.train.config import InputError, TrainConfig
from demopt.train.folder import RunFolder
from demopt.train.processes import RunError


def check(config: TrainConfig) -> None:
    """Raise InputError, before the first step, if the upload at the end could not succeed.

    Examples:
        >>> check(TrainConfig(push_to_hub="me/model"))
        Traceback (most recent call last):
        demopt.train.config.InputError: --push-to-hub me/model needs the network; add --online
    """
    name = config.push_to_hub
    if not name:
        return
    if not config.online:
        raise InputError(f"--push-to-hub {name} needs the network; add --online")
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise InputError(f"--push-to-hub {name}: {one_line(error)}") from None
    if constants.HF_HUB_OFFLINE:
        raise InputError(f"--push-to-hub {name}: HF_HUB_OFFLINE is set; unset it, or leave the flag out")
    if get_token() is None:
        raise InputError(f"--push-to-hub {name}: not logged in; run hf auth login, or set HF_TOKEN")


def push(config: TrainConfig, folder: RunFolder) -> None:
    """Upload the model, if --push-to-hub asks for it, to a repository that is private if it is new.

    RunError, in one line with how to try again, if that fails: the model is whole in the folder.
    """
    name = config.push_to_hub
    if not name:
        return
    from huggingface_hub import HfApi

    print(f"uploading {folder.model} to {name}", flush=True)
    try:
        api = HfApi()
        url = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=url.repo_id, folder_path=folder.model, commit_message=f"{config.steps} steps")
    except KeyboardInterrupt:
        raise RunError(_failed(config, folder, "stopped"), 130) from None
    except Exception as error:  # of the network, the hub, the disk: each has errors of its own
        raise RunError(_failed(config, folder, one_line(error)), 1) from None
    print(f"the model is at {url}", flush=True)


def _failed(config: TrainConfig, folder: RunFolder, why: str) -> str:
    again = shlex.join(["hf", "upload", config.push_to_hub, str(folder.model), "--private"])
    return f"--push-to-hub: {why}; nothing is lost, the model is in {folder.model}. Again with: {again}"
