"""Words for mistakes: which of several, how long, and what YAML would have let pass."""

import pytest

from jaxinfer import JaxinferError
from jaxinfer.config.run_file import as_run_file
from jaxinfer.config.stages import StageConfig
from jaxinfer.options.validation import parse_yaml, shown


def test_a_mistyped_name_is_told_before_what_is_missing() -> None:
    with pytest.raises(JaxinferError, match=r"^grup: unknown option, did you mean 'group'\?$"):
        StageConfig.model_validate({"grup": "a"})
    with pytest.raises(JaxinferError, match=r"^group is missing$"):
        StageConfig.model_validate({"layers": 3})


@pytest.mark.parametrize(
    ("value", "text"), [("x" * 58, f"'{'x' * 58}'"), ("x" * 59, f"'{'x' * 56}..."), (7, "7")]
)
def test_sixty_characters_of_a_value_are_shown(value: object, text: str) -> None:
    assert shown(value) == text
    assert len(text) <= 60


def test_a_key_stands_once_in_a_mapping() -> None:
    assert parse_yaml("{a: 1, b: {a: 2}}") == {"a": 1, "b": {"a": 2}}
    with pytest.raises(JaxinferError, match=r"'a' stands 2 times in the mapping at line 2"):
        parse_yaml("\na: 1\nb: 2\na: 3")
    with pytest.raises(JaxinferError, match=r"50 stands 2 times in the mapping at line 1"):
        parse_yaml("{50: 2, 50.0: 3}")
    # As a name it is one, however it is written.
    with pytest.raises(JaxinferError, match=r"'1' stands 2 times in the mapping at line 1"):
        parse_yaml("{1: a, '1': b}")
    # What is merged in may be overridden.
    assert parse_yaml("x: &x {a: 1}\ny: {<<: *x, a: 2}")["y"] == {"a": 2}


def test_names_may_look_like_numbers() -> None:
    config = as_run_file({"groups": {1: {}, 2.5: {}}, "instances": {7: {"group": "1"}}})
    assert (list(config.groups), list(config.instances)) == (["1", "2.5"], ["7"])


@pytest.mark.parametrize("text", ["1e5", "1E5", "1e+5"])
def test_numbers_that_yaml_does_not_know(text: str) -> None:
    with pytest.raises(JaxinferError) as error:
        as_run_file({"watchdog_s": parse_yaml(text)})
    assert str(error.value).endswith("must be a number: YAML wants a dot, 1.0e+05")
    assert as_run_file({"watchdog_s": parse_yaml("1.0e+05")}).watchdog_s == 1e5


@pytest.mark.parametrize(
    ("text", "hint"), [("1e3", ": 1000"), ("2e-1", ""), ("1e300", ""), ("1e999", "")]
)
def test_what_is_said_of_an_integer_would_work(text: str, hint: str) -> None:
    with pytest.raises(JaxinferError) as error:
        as_run_file({"engine": {"max_num_seqs": parse_yaml(text)}})
    assert str(error.value).endswith(f"is '{text}', must be an integer{hint}")
