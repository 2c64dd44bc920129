"""Downloads a data set of the Hugging Face Hub as Parquet files.

The library `datasets` resolves configurations and splits, as `load_dataset` does. HF_ENDPOINT and HF_TOKEN come from
the environment.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from finetune_trainer.pod.exit_status import DataError, RecipeRefusedError, TrainingError
from finetune_trainer.storage.relative_paths import UnsafePathError, check_relative_path

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from datasets import DatasetBuilder

    from finetune_crds.source import SourceLocation

# How the error of `datasets` begins that refuses a path out of the data set.
_OUTSIDE = "Data files don't belong to "
_DEFAULT_SPLIT = "train"
_LOGIN_ADVICE = (
    "in envFrom of spec.pods.prepare or spec.pods.all, name a Secret whose HF_TOKEN may read the data set"
)


def fetch(source: SourceLocation, scratch: Path, field: str) -> tuple[list[str], str]:
    """Download the files of one split, and return their paths and their commit.

    Args:
        scratch: folder for the files. Parquet is downloaded as it is; other formats are converted to Parquet.
        field: the recipe's field that holds the source, for messages.

    Raises:
        RecipeRefusedError: the data set requires its own loading script.
        DataError: the Hub does not have the data set, its revision, configuration or split, or denies the pod
            access; or its files do not parse.
        TrainingError: the Hub does not answer.
    """
    from datasets import disable_progress_bars

    disable_progress_bars()
    with _translate_errors(source, field), _refuse_unsafe_paths(source, field):
        commit = _find_commit(source, field)
        builder = _load_builder(source, commit, scratch, field)
        split = _choose_split(source, builder, field)
        paths = _download_parquet(source, builder, split, commit, scratch) or _convert_to_parquet(
            builder, split, scratch
        )
        return paths, commit


@contextmanager
def _translate_errors(source: SourceLocation, field: str) -> Iterator[None]:
    """Translate errors of the Hub into errors of the pod."""
    from datasets.data_files import EmptyDatasetError
    from datasets.exceptions import DataFilesNotFoundError, DatasetGenerationError
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # whichever httpx the Hub's client uses

    name = f"{field}.dataset {source.dataset}"
    try:
        yield
    except HFValidationError as error:
        raise DataError(
            "MissingSource", f"{name} is not a valid id of a data set: use the form org/name"
        ) from error
    except GatedRepoError as error:
        raise DataError(
            "AccessDenied",
            f"{name} is gated: accept the terms of the data set on the Hub, and {_LOGIN_ADVICE}",
        ) from error
    except RepositoryNotFoundError as error:
        raise DataError(
            "MissingSource",
            f"{name} does not exist: correct {field}.dataset; if the data set is private, {_LOGIN_ADVICE}",
        ) from error
    except RevisionNotFoundError as error:
        raise DataError(
            "MissingSource", f"{name} has no revision {source.revision}: correct {field}.revision"
        ) from error
    except (EmptyDatasetError, DataFilesNotFoundError) as error:
        raise DataError("EmptySource", f"{name} has no files that can be read as rows") from error
    except DatasetGenerationError as error:
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        raise DataError("UnreadableSource", f"{name} cannot be read: {reason}") from error
    except (httpx.HTTPError, ConnectionError, LocalEntryNotFoundError) as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
            raise DataError(
                "AccessDenied", f"{name} is not accessible to the pod: {_LOGIN_ADVICE}"
            ) from error
        raise TrainingError(
            "HubUnreachable",
            f"{name} cannot be downloaded because the Hub does not respond: allow egress from the pod, or set HF_ENDPOINT to a mirror of "
            "the Hub",
        ) from error


@contextmanager
def _refuse_unsafe_paths(source: SourceLocation, field: str) -> Iterator[None]:
    """Translate the errors for files whose path leads out of the data set: ours, and that of `datasets`."""
    name = f"{field}.dataset {source.dataset}"
    try:
        yield
    except UnsafePathError as error:
        raise DataError(
            "UnsafeSource", f"{name} has a file {error}: use another data set or revision"
        ) from error
    except ValueError as error:
        if not str(error).startswith(_OUTSIDE):
            raise
        raise DataError(
            "UnsafeSource", f"{name} has files outside of the data set: use another data set or revision"
        ) from error


def _find_commit(source: SourceLocation, field: str) -> str:
    """Return the commit of a revision. A data set with its own loading script is refused."""
    from huggingface_hub import HfApi

    dataset = source.address
    info = HfApi().dataset_info(dataset, revision=source.revision)
    # NB: the description of a gated data set is public, but its files are not, so access to the files is checked now.
    HfApi().auth_check(dataset, repo_type="dataset")
    script = f"{dataset.rpartition('/')[2]}.py"
    if any(file.rfilename == script for file in info.siblings or []):
        raise RecipeRefusedError(
            f"{field}.dataset {dataset} is loaded by its script {script}, and scripts of data sets are not run: set "
            f"{field}.revision to refs/convert/parquet, or name a copy of the data set in Parquet"
        )
    return str(info.sha)


def _load_builder(source: SourceLocation, commit: str, scratch: Path, field: str) -> DatasetBuilder:
    """Return the builder with which `datasets` loads the configuration.

    Raises:
        DataError: the configuration does not exist, or the source names none and the data set has several without a default.
    """
    from datasets import config, get_dataset_config_names, load_dataset_builder

    # NB: counting downloads sends a request to a server other than the Hub.
    config.HF_UPDATE_DOWNLOAD_COUNTS = False
    # NB: without the scheme, a folder of that name in the working directory takes precedence over the Hub.
    path = f"hf://datasets/{source.dataset}"
    try:
        return load_dataset_builder(path, source.config, revision=commit, cache_dir=str(scratch / "cache"))
    except ValueError:
        names = get_dataset_config_names(path, revision=commit)
        # The named configuration is not the cause if it exists, nor is a missing name if there is only one configuration.
        is_choice_valid = len(names) < 2 if source.config is None else source.config in names
        if is_choice_valid or not names:
            raise
        raise _build_choice_error(source, field, "config", names) from None


def _build_choice_error(source: SourceLocation, field: str, part: str, names: list[str]) -> DataError:
    """Return the error of a source whose `part`, config or split, is not in `names`."""
    value = getattr(source, part)
    mistake = f"has no {part} {value}" if value else f"has no default {part}"
    choice = names[0] if len(names) == 1 else f"one of {', '.join(names)}"
    return DataError(
        "MissingSource",
        f"{field}.dataset {source.dataset} {mistake}: set {field}.{part} to {choice}",
    )


def _choose_split(source: SourceLocation, builder: DatasetBuilder, field: str) -> str:
    """Return the split that the source names; if it names none, the only split, or else the split `train`.

    Raises:
        DataError: the data set does not have the split.
    """
    splits = [str(name) for name in builder.config.data_files or {}]
    if source.split is None and len(splits) == 1:
        return splits[0]
    split = source.split or _DEFAULT_SPLIT
    if split not in splits:
        raise _build_choice_error(source, field, "split", splits)
    return split


def _download_parquet(
    source: SourceLocation, builder: DatasetBuilder, split: str, commit: str, scratch: Path
) -> list[str]:
    """Download the files of a split if they are Parquet; otherwise return an empty list."""
    from huggingface_hub import snapshot_download

    prefix = f"hf://datasets/{source.dataset}@{commit}/"
    names = [str(file).removeprefix(prefix) for file in builder.config.data_files[split]]
    if not all(name.endswith(".parquet") for name in names):
        return []
    for name in names:
        check_relative_path(name)
    folder = snapshot_download(
        source.address,
        repo_type="dataset",
        revision=commit,
        allow_patterns=names,
        local_dir=scratch / "files",
    )
    return [f"{folder}/{name}" for name in names]


def _convert_to_parquet(builder: DatasetBuilder, split: str, scratch: Path) -> list[str]:
    """Write all splits of a configuration as Parquet, and return the files of `split`."""
    folder = scratch / "files"
    builder.download_and_prepare(str(folder), file_format="parquet")
    # The files are {prefix}.parquet if there is one shard, else {prefix}-00000-of-00002.parquet and so on. NB: for the split
    # train, {prefix}* would also match the files of a split train_sft; names of splits have no hyphen.
    prefix = f"{builder.dataset_name}-{split}"
    files = [*folder.glob(f"{prefix}.parquet"), *folder.glob(f"{prefix}-*.parquet")]
    return [str(path) for path in sorted(files)]
