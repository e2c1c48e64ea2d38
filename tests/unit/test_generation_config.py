"""generation_config.json: what is read, what is left alone and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cuengine.errors import ModelError
from cuengine.model.generation_config import GenerationDefaults, read_generation_config


def write(folder: Path, content: Any) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "generation_config.json").write_text(text)
    return folder


def test_no_file_means_no_defaults(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path) == GenerationDefaults()


def test_all_defaults_are_read(tmp_path: Path) -> None:
    content = {
        "bos_token_id": 1,
        "eos_token_id": [128001, 128009],
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 40,
        "repetition_penalty": 1.1,
        "do_sample": True,
        "transformers_version": "4.40.0",
    }
    assert read_generation_config(write(tmp_path, content)) == GenerationDefaults(
        (128001, 128009), 0.6, 0.9, 40, 1.1
    )


@pytest.mark.parametrize(
    ("value", "expected"), [(2, (2,)), ([2], (2,)), ([7, 2, 7], (7, 2)), (None, ()), ([], ())]
)
def test_eos_may_be_one_id_or_several(
    tmp_path: Path, value: Any, expected: tuple[int, ...]
) -> None:
    assert (
        read_generation_config(write(tmp_path, {"eos_token_id": value})).eos_token_ids == expected
    )


def test_sampling_values_count_even_where_transformers_would_search_greedily(
    tmp_path: Path,
) -> None:
    content = {"do_sample": False, "temperature": 0.7}
    assert read_generation_config(write(tmp_path, content)).temperature == 0.7


def test_a_whole_number_is_a_temperature(tmp_path: Path) -> None:
    assert read_generation_config(write(tmp_path, {"temperature": 1})).temperature == 1.0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "holds a JSON list"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"eos_token_id": [1, None]}, "eos_token_id"),
        ({"eos_token_id": True}, "eos_token_id"),
        ({"eos_token_id": -1}, "eos_token_id"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": -1}, "temperature is -1"),
        ('{"temperature": NaN}', "temperature is nan"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"top_k": -2}, "top_k is -2"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
    ],
)
def test_a_malformed_file_is_refused_with_its_name_and_the_value(
    tmp_path: Path, content: Any, message: str
) -> None:
    with pytest.raises(ModelError, match=rf"generation_config\.json: {message}"):
        read_generation_config(write(tmp_path, content))
