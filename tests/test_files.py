"""Every parameter that names a file or folder: what cannot be read or written costs one line, and never exit 1."""

from typing import get_type_hints

import numpy as np
import pytest

from kvfold.analysis import cli

HERE = "--model qwen3-8b --gpu h200"
SYNTH = {
    "poisson": "--requests 10 --rate 1 --input-tokens 10 --output-tokens 10",
    "sample": "",
    "agent": "",
    "chat": "",
    "rag": "",
}
#: By (command, parameter): its arguments, with {} for the file in question.
READ = {
    ("codec calibrate", "files"): "{} --out OUT",
    ("codec calibrate", "rope_config"): "ARRAY --out OUT --rotate-to 1024 --rope-config {}",
    ("codec pack", "calibration"): "ARRAY --out OUT --calibration {}",
    ("codec pack", "file"): "{} --out OUT",
    ("codec ratio", "calibrate_on"): "ARRAY --calibrate-on {}",
    ("codec ratio", "calibration"): "ARRAY --calibration {}",
    ("codec ratio", "files"): "{}",
    ("codec unpack", "file"): "{} --out OUT",
    ("kernels bench", "fa3"): "--fa3 {}",
    ("kernels bench", "grid"): "--grid {}",
    ("plan", "costs"): f"{HERE} --trace TRACE --costs {{}}",
    ("replay", "costs"): f"TRACE {HERE} --costs {{}}",
    ("step", "costs"): f"{HERE} --costs {{}}",
    ("traces synth servegen", "folder"): "{} --out OUT",
    ("validate", "costs"): f"{HERE} --vllm-result TRACE --costs {{}}",
    ("validate", "data"): "--only memory --data {}/in",
    ("validate", "fit"): f"{HERE} --fit {{}}",
    ("validate", "vllm_result"): f"{HERE} --vllm-result {{}}",
}
WRITTEN = {
    ("codec calibrate", "out"): "ARRAY --out {}",
    ("codec pack", "out"): "ARRAY --out {}",
    ("codec unpack", "out"): "PACKED --out {}",
    ("kernels bench", "out"): "--out {}",
    ("plan", "report"): f"{HERE} --trace ABSENT --report {{}}",  # said before anything is read
    ("replay", "out"): f"TRACE {HERE} --out {{}}",
    ("traces change", "out"): "TRACE {}",
    ("traces convert", "out"): "TRACE {}",
    ("traces synth", "out"): "--like TRACE --out {}",
    ("validate", "report"): "--only ABSENT --report {}",
} | {(f"traces synth {name}", "out"): f"{arguments} --out {{}}" for name, arguments in SYNTH.items()}


@pytest.fixture
def kvfold(run_kvfold, monkeypatch, tmp_path):
    """Runs a command line beside a trace, an array and a folder."""
    np.save(tmp_path / "ARRAY", np.zeros((1, 256, 64), np.uint16))
    (tmp_path / "ARRAY.npy").rename(tmp_path / "ARRAY")
    (tmp_path / "TRACE").write_text("arrival_time_s,input_tokens,output_tokens\n0,400,20\n1,500,30\n")
    (tmp_path / "FOLDER").mkdir()
    monkeypatch.chdir(tmp_path)

    def run(line):
        code, _, said = run_kvfold(*line.split())
        return code, said

    return run


def paths(app, name=()):
    """(command, parameter) of all that is declared as a path."""
    commands = [
        (each.name or each.callback.__name__.strip("_"), each.callback) for each in app.registered_commands
    ]
    if app.registered_callback:
        commands.append(("", app.registered_callback.callback))
    for own, function in commands:
        for parameter, hint in get_type_hints(function).items():
            if "Path" in str(hint):
                yield " ".join((*name, own)).strip(), parameter
    for group in app.registered_groups:
        yield from paths(group.typer_instance, (*name, group.name))


def test_no_path_is_left_out():
    needs_data = {("traces synth servegen", "out")}  # the same option and writer as the other generators'
    assert set(paths(cli.app)) == READ.keys() | WRITTEN.keys() | needs_data


def named(rows):
    return pytest.mark.parametrize(
        ("command", "arguments"),
        [pytest.param(name, line, id=f"{name} {parameter}") for (name, parameter), line in rows.items()],
    )


@named(READ)
@pytest.mark.parametrize("kind", ["missing", "folder", "binary"])
def test_a_file_that_cannot_be_read(kvfold, tmp_path, command, arguments, kind):
    path = tmp_path / kind
    if kind == "folder":
        path.mkdir()
    elif kind == "binary":
        path.write_bytes(bytes(range(255, -1, -1)) * 10)
    if kind == "binary" and "--fa3" in arguments:
        pytest.skip("a library is opened on a GPU only")
    code, err = kvfold(f"{command} {arguments.format(path)}")
    assert code in (2, 5), err
    assert kind in err.splitlines()[-1]
    assert not (tmp_path / "OUT").exists()


@named(WRITTEN)
@pytest.mark.parametrize("kind", ["missing/under", "TRACE/under", "FOLDER"])
def test_a_file_that_cannot_be_written(kvfold, tmp_path, command, arguments, kind):
    if (command, kind) in (("replay", "missing/under"), ("replay", "FOLDER"), ("kernels bench", "FOLDER")):
        pytest.skip("a folder is what is asked for")
    if "PACKED" in arguments:
        assert kvfold("codec pack ARRAY --out PACKED")[0] == 0
    code, err = kvfold(f"{command} {arguments.format(kind)}")
    assert code in (2, 5), err
    assert kind.split("/")[0] in err.splitlines()[-1]
