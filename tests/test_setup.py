"""The Makefile and .ci/run: what a fresh machine is told, what a second run skips; what the tests collect."""
import ast
import configparser
import os
import re
import shutil
import stat
import subprocess
from importlib.metadata import version

import pytest
from packaging.requirements import Requirement

from conftest import ROOT

MAKE = shutil.which("make")
needs_make = pytest.mark.skipif(MAKE is None, reason="make is not installed")


def requirements(name):
    lines = (ROOT / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_what_matters_is_pinned():
    names = requirements("requirements.txt")
    assert "torch==2.13.0" in names and "transformers>=5.17,<6" in names
    assert all(re.fullmatch(r"[\w-]+(==[\d.]+|>=[\d.]+,<\d+)", line) for line in names)
    assert not {"pytest", "hypothesis"} & {re.split("[=><]", line)[0] for line in names}


def test_what_is_installed_is_what_is_asked_for():
    for line in requirements("requirements.txt") + requirements("requirements-test.txt"):
        requirement = Requirement(line)
        assert requirement.specifier.contains(version(requirement.name)), requirement


def test_pytest_collects_tests_only():
    """test.py in the root is the benchmark driver."""
    config = configparser.ConfigParser()
    config.read(ROOT / "pytest.ini")
    assert config["pytest"]["testpaths"] == "tests" and config["pytest"]["pythonpath"] == "."


@pytest.fixture
def project(tmp_path):
    """The set-up files in a folder of their own, with scripts that only say that they were run."""
    for name in ("Makefile", "requirements.txt", "requirements-test.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    return tmp_path


def make(project, *arguments):
    return run([MAKE, *arguments], project)


def run(command, folder):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(command, cwd=folder, env=inherited, text=True, capture_output=True)


def fake_python(project, body):
    path = project / "fake-python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return f"PYTHON={path}"


def with_environment(project, pytest_status=0):
    """A .venv whose python only writes down what it was called with."""
    (project / ".venv" / "bin").mkdir(parents=True)
    python = project / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\necho "$*" >> calls\ncase "$*" in *pytest*) exit {pytest_status};; esac\n')
    python.chmod(0o755)


def calls(project):
    log = (project / "calls").read_text().splitlines()
    (project / "calls").unlink()
    return log


@needs_make
@pytest.mark.parametrize("body, said", [
    ("exit 1", "is not Python 3.10 or newer"),
    ('case "$*" in *version_info*) exit 0;; *) exit 1;; esac', "cannot make environments"),
])
@pytest.mark.parametrize("goal", ["test", "bench"])
def test_an_unfit_python_is_one_clear_line(project, goal, body, said):
    result = make(project, goal, fake_python(project, body))
    lines = [line for line in result.stderr.splitlines() if not line.startswith("make:")]
    assert result.returncode == 2 and len(lines) == 1 and said in lines[0]
    assert not (project / ".venv").exists()


@needs_make
def test_a_missing_python_is_one_clear_line(project):
    result = make(project, "test", "PYTHON=/nowhere/python3")
    assert result.returncode == 2 and "/nowhere/python3 is not Python 3.10 or newer" in result.stderr


@needs_make
def test_each_command_alone_does_everything_and_then_skips_the_installation(project):
    with_environment(project)
    install = "-m pip install --disable-pip-version-check -r "
    assert make(project, "bench", "BENCH_FLAGS=--maxLen 7").returncode == 0
    assert calls(project) == ["-m pip --version", install + "requirements.txt", "downloadModel.py",
                              "downloadData.py", "test.py --pair auto --maxLen 7"]
    assert make(project, "bench").returncode == 0
    *before, bench = calls(project)
    assert before == ["downloadModel.py", "downloadData.py"] and bench.startswith("test.py --pair auto")
    assert make(project, "test").returncode == 0
    assert calls(project) == [install + "requirements-test.txt", "downloadModel.py smollm2",
                              "downloadData.py", "-m pytest -q"]
    assert make(project, "test", "DATA_FLAGS=--from D").returncode == 0
    assert calls(project) == ["downloadModel.py smollm2", "downloadData.py --from D", "-m pytest -q"]


@needs_make
def test_other_requirements_are_installed_again(project):
    with_environment(project)
    make(project, "test")
    calls(project)
    later = (project / ".venv" / "installed-test").stat().st_mtime + 10
    os.utime(project / "requirements.txt", (later, later))
    make(project, "test")
    assert sum("install" in call for call in calls(project)) == 2


@needs_make
def test_an_interrupted_installation_is_taken_up_again(project):
    with_environment(project)
    python = project / ".venv" / "bin" / "python"
    whole = python.read_text()
    python.write_text(whole.replace("*pytest*)", "*install*)").replace("exit 0", "exit 1"))
    assert make(project, "test").returncode == 2
    python.write_text(whole)
    calls(project)
    assert make(project, "test").returncode == 0
    assert sum("install" in call for call in calls(project)) == 2


@needs_make
def test_ci_runs_the_tests_from_anywhere_and_reports_their_failure(project):
    assert (ROOT / ".ci" / "run").stat().st_mode & stat.S_IXUSR
    with_environment(project)
    assert run([project / ".ci" / "run"], "/").returncode == 0
    assert calls(project)[-1] == "-m pytest -q"
    shutil.rmtree(project / ".venv")
    with_environment(project, pytest_status=1)
    assert run([project / ".ci" / "run"], "/").returncode != 0


def test_the_sources_speak_the_oldest_python_that_is_supported():
    """Python 3.10: no newer syntax."""
    for path in [*ROOT.glob("*.py"), *ROOT.glob("tests/*.py")]:
        ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, 10))
