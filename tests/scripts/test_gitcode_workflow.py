"""The workflow of GitCode: what GitCode asks of its form, and the command of the one of GitHub."""

import pathlib

import yaml

ROOT = pathlib.Path(__file__).parents[2]
# Characters that a step's name must not have there.
REFUSED = set("[]|!>&#?*=<'\"@${}+")


def workflow(path):
    # YAML 1.1 reads the key `on` as true.
    return yaml.safe_load((ROOT / path).read_text())


def steps_of(path):
    return [step for job in workflow(path)["jobs"].values() for step in job["steps"]]


def test_each_job_and_step_has_a_name_and_a_job_a_list_of_labels():
    path = ".gitcode/workflows/ci.yml"
    assert isinstance(workflow(path)[True], dict)
    for job in workflow(path)["jobs"].values():
        assert job["name"] and isinstance(job["runs-on"], list)
    for step in steps_of(path):
        assert step.get("name"), f"the step {step} has no name"
        assert not REFUSED & set(step["name"]) and "/" not in step.get("uses", "")


def test_it_runs_what_github_runs():
    here = [step["run"] for step in steps_of(".gitcode/workflows/ci.yml") if "run" in step]
    there = [step["run"] for step in steps_of(".github/workflows/ci.yml") if "run" in step]
    assert [command.strip() for command in here] == ["bash .ci/run"]
    assert here[0].strip() in there[-1]
