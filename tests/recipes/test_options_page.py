"""The page of options is made of the options, and has the defaults that the script uses."""

import re

import options_page
import pytest
import train_gpt2_slt
import yaml

from hf_slt.training.arguments import Arguments


def test_the_page_is_that_of_the_options_as_they_are():
    assert options_page.PAGE.read_text() == options_page.page(), "run python recipes/options_page.py"


def test_defaults_are_those_of_the_script_without_any_flag(monkeypatch):
    class Parsed(Exception):
        pass

    def stop(arguments, *_):
        raise Parsed(arguments)

    monkeypatch.setattr(train_gpt2_slt, "train_and_compare", stop)
    monkeypatch.setattr("sys.argv", ["train_gpt2_slt.py"])
    with pytest.raises(Parsed) as caught:
        train_gpt2_slt.main()
    (used,) = caught.value.args
    assert used.default_preset == options_page.PRESET
    shown = dict(re.findall(r"^\| `(\w+)` \| (.*?) \| ", options_page.PAGE.read_text(), re.M))
    assert shown.keys() == used.flat().keys()
    preset, code = yaml.safe_load(options_page.PRESET.read_text()), Arguments().flat()
    for name, value in used.flat().items():
        first = re.match(r"`(.*?)`", shown[name])
        assert (first and first[1]) == (None if value is None else str(value)), name
        assert ("nano.yaml" in shown[name]) == (name in preset), name
        assert value == code[name] or name in preset, name
    assert "`128` (`nano.yaml`; otherwise `768`)" in shown["n_embd"]
    assert options_page.HEAD.split("\n")[2].startswith("**Without `--config`")
