"""The recipes of docs/recipes: what can be run is run, and manifests are compared with schemas."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.settings.places import read_settings

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "recipes"
PAGES = ROOT / "docs" / "recipes"
BATCH = pa.record_batch({"id": [1, 2], "word": ["one", "three"]})

pytestmark = pytest.mark.checkout


# Pages


def test_every_recipe_is_listed_and_says_whether_it_was_run() -> None:
    listed = (ROOT / "docs" / "README.md").read_text()
    pages = sorted(PAGES.glob("*.md"))
    assert {page.stem for page in pages} == {
        "container", "databricks", "emr", "kubernetes", "venv-pack", "yarn",
    }  # fmt: skip
    for page in pages:
        assert f"(recipes/{page.name})" in listed
        text = page.read_text()
        tested = re.search(r"^\*\*(Tested|Checked|Not tested):\*\* ", text, re.MULTILINE)
        assert tested, f"{page.name} does not say what was run"


# Kubernetes


@pytest.fixture(scope="module")
def manifests() -> dict[str, dict[str, Any]]:
    import yaml  # comes with what checks manifests, which a wheel is not tested with

    text = (RECIPES / "kubernetes" / "words.yaml").read_text()
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def test_manifests_are_what_kubernetes_takes() -> None:
    command = [str(Path(sys.executable).parent / "kubernetes-validate"), "--strict", "--quiet"]
    command.append(str(RECIPES / "kubernetes" / "words.yaml"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_wrong_manifest_is_refused(tmp_path: Path) -> None:
    text = (RECIPES / "kubernetes" / "words.yaml").read_text()
    assert "containerPort" in text
    (tmp_path / "words.yaml").write_text(text.replace("containerPort", "containersPort"))
    command = [str(Path(sys.executable).parent / "kubernetes-validate"), "--strict", "--quiet"]
    done = subprocess.run([*command, str(tmp_path / "words.yaml")], capture_output=True, timeout=60)
    assert done.returncode != 0


def test_manifests_fit_each_other(manifests: dict[str, dict[str, Any]]) -> None:
    pod = manifests["Deployment"]["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert manifests["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert manifests["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert manifests["Service"]["spec"]["selector"] == labels
    assert (
        manifests["PodDisruptionBudget"]["spec"]["minAvailable"]
        < (manifests["Deployment"]["spec"]["replicas"])
    )
    (container,) = pod["spec"]["containers"]
    ports = {port["name"]: port["protocol"] for port in container["ports"]}
    for port in manifests["Service"]["spec"]["ports"]:
        assert ports[port["targetPort"]] == port["protocol"]
    (secret,) = (each["secret"] for each in pod["spec"]["volumes"] if "secret" in each)
    page = (PAGES / "kubernetes.md").read_text()
    made = re.findall(r"^kubectl create secret tls (\S+) ", page, re.MULTILINE)
    assert made == [secret["secretName"]]
    options = dict(part.removeprefix("--").split("=", 1) for part in container["args"])
    (mount,) = (each for each in container["volumeMounts"] if each["name"] == "certificates")
    for option, key in (("certificate", "tls.crt"), ("key", "tls.key")):
        assert options[option] == f"{mount['mountPath']}/{key}"


def test_no_manifest_replaces_the_certificate(manifests: dict[str, dict[str, Any]]) -> None:
    """The page makes the Secret first; what is applied after it must not have one."""
    assert sorted(manifests) == ["Deployment", "PodDisruptionBudget", "Service"]


def test_kubernetes_waits_for_the_drain(manifests: dict[str, dict[str, Any]]) -> None:
    """It kills a pod that takes longer, and with it the calls that are open."""
    spec = manifests["Deployment"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    (drain,) = (part for part in container["args"] if part.startswith("--drain="))
    seconds = int(drain.removeprefix("--drain=").removesuffix("s"))
    assert spec["terminationGracePeriodSeconds"] >= seconds + 5
    variables = {each["name"]: each["value"] for each in container["env"]}
    settings = read_settings({"timing.drain_timeout": seconds}, environment=variables).config()
    # Kubernetes has to see that the pod is not ready while it still takes calls.
    probe = container["readinessProbe"]
    seen = probe["periodSeconds"] * probe["failureThreshold"]
    assert 0 < seen < settings.timing.drain_delay < seconds / 2


def test_the_probes_of_a_pod_ask_its_admin_port(manifests: dict[str, dict[str, Any]]) -> None:
    (container,) = manifests["Deployment"]["spec"]["template"]["spec"]["containers"]
    (admin,) = (part for part in container["args"] if part.startswith("--admin="))
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert admin == f"--admin=0.0.0.0:{ports['admin']}"
    asked = {name: container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    assert {name: probe["httpGet"] for name, probe in asked.items()} == {
        "startup": {"path": "/health/ready", "port": "admin"},
        "readiness": {"path": "/health/ready", "port": "admin"},
        "liveness": {"path": "/health/live", "port": "admin"},
    }
    shown = [port["targetPort"] for port in manifests["Service"]["spec"]["ports"]]
    assert "admin" not in shown, "clients of the service have no business there"


# A container, and an archive for executors


def run(*command: str | Path, **options: Any) -> str:
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    done = subprocess.run([str(word) for word in command], timeout=900, **options)
    assert done.returncode == 0, f"{command}: {done.stdout[-3000:]}{(done.stderr or '')[-3000:]}"
    return str(done.stdout)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the sources as they are, for this Python on this machine."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    run(*command, "--no-build-isolation", "--wheel-dir", folder, ROOT)
    (made,) = folder.glob("*.whl")
    return made


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_container_serves_is_healthy_and_drains(wheel: Path) -> None:
    if os.getuid() != 0 or not shutil.which("apt-get"):
        pytest.skip("needs root on Debian, for podman")
    if not all(map(shutil.which, ("podman", "runc", "mmdebstrap"))):
        run("ci/image.sh", cwd=ROOT)  # installs them
    image = run(RECIPES / "container" / "build.sh", wheel).strip()
    name = f"aqueduct-{uuid.uuid4().hex[:12]}"
    podman = ["podman", "--runtime", "runc"]
    opened = subprocess.run(
        ["sh", "-c", "ulimit -Hn"], capture_output=True, text=True
    ).stdout.strip()
    limits = [f"--ulimit=nofile={opened}:{opened}", "--ulimit=nproc=32768:32768"]
    run(
        *podman, "run", "--detach", "--name", name, "--network", "host", *limits,
        image, "--listen", "aqueduct+tcp://127.0.0.1:0", "--admin", "127.0.0.1:0",
    )  # fmt: skip
    try:
        address = _printed(lambda: run(*podman, "logs", name), r"aqueduct\+tcp://127\.0\.0\.1:\d+")
        run(*podman, "healthcheck", "run", name)
        admin = _printed(
            lambda: run(*podman, "logs", name, stderr=subprocess.STDOUT), r"http://127\.0\.0\.1:\d+"
        )
        for path in ("/health/live", "/health/ready"):
            with urllib.request.urlopen(f"{admin}{path}", timeout=60) as answered:
                assert answered.status == 200
        with aqueduct.SyncClient(address) as client:
            answer = client.call("lengths", BATCH)
        assert answer.to_pydict() == {"id": [1, 2], "length": [3, 5]}
        assert run(*podman, "exec", name, "id", "--user").strip() == "10001"
        run(*podman, "stop", "--time", "60", name)
        state = run(*podman, "inspect", "--format", "{{.State.ExitCode}}", name)
        assert state.strip() == "0"  # drained, not killed
    finally:
        subprocess.run([*podman, "rm", "--force", "--time", "0", name], timeout=120, check=False)


def _printed(output: Any, pattern: str) -> str:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        text = output()
        if found := re.search(pattern, text):
            return found[0]
        time.sleep(0.1)
    raise AssertionError(f"no {pattern} in: {text}")


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(1800)
def test_executors_have_aqueduct_from_an_archive(wheel: Path, tmp_path: Path) -> None:
    """They find no other one: they have neither this environment nor this tree."""
    archive = tmp_path / "executors.tar.gz"
    python = os.path.realpath(sys.executable)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHON": python}
    run(
        RECIPES / "venv_pack" / "pack.sh", archive, wheel, "pandas>=2.2,<3", "numpy",
        env=environment,
    )  # fmt: skip
    with _serving(tmp_path) as address, _cluster(tmp_path) as master:
        answer = run(
            "spark-submit", "--master", master, "--archives", f"{archive}#environment",
            "--conf", "spark.executor.memory=512m", "--conf", "spark.driver.host=127.0.0.1",
            RECIPES / "venv_pack" / "job.py", address,
            cwd=tmp_path,
            env={
                **environment,
                "PYSPARK_DRIVER_PYTHON": sys.executable,
                "PYSPARK_PYTHON": "./environment/bin/python",
            },
        )  # fmt: skip
    assert answer.strip().splitlines()[-1] == "{6: 10, 7: 90, 8: 900}"
    work = tmp_path / "work"
    assert list(work.glob("app-*/*/environment/bin/python")), list(work.rglob("stderr"))


@contextlib.contextmanager
def _serving(folder: Path) -> Iterator[str]:
    """The service of the recipes, as a program; its address."""
    log = folder / "service.log"
    command = [str(Path(sys.executable).parent / "aqueduct"), "serve", "service:service"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--listen", "aqueduct+tcp://127.0.0.1:0"],
            cwd=RECIPES / "container",
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=output,
            stderr=output,
        )
    try:
        yield _printed(log.read_text, r"aqueduct\+tcp://127\.0\.0\.1:\d+")
    finally:
        process.terminate()
        process.wait(60)


@contextlib.contextmanager
def _cluster(folder: Path) -> Iterator[str]:
    """A standalone master and a worker; the address of the master."""
    import pyspark

    home = Path(str(pyspark.__file__)).parent
    names = {"PYTHONPATH", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"}
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"SPARK_HOME": str(home), "SPARK_LOCAL_IP": "127.0.0.1"}
    started: list[subprocess.Popen[bytes]] = []

    def start(kind: str, *arguments: str) -> Path:
        log = folder / f"{kind}.log"
        program = f"org.apache.spark.deploy.{kind.lower()}.{kind}"
        common = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
        with log.open("wb") as output:
            started.append(
                subprocess.Popen(
                    [str(home / "bin" / "spark-class"), program, *common, *arguments],
                    stdout=output,
                    stderr=output,
                    cwd=folder,
                    env=environment,
                )
            )
        return log

    try:
        log = start("Master")
        master = _printed(log.read_text, r"spark://127\.0\.0\.1:\d+")
        log = start(
            "Worker", "--cores", "2", "--memory", "1g", "--work-dir", f"{folder}/work", master
        )
        _printed(log.read_text, "Successfully registered with master")
        yield master
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(60)
