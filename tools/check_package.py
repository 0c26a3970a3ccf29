"""Build the wheel and the source distribution, install each in an empty environment, and use it.

Needs the package ``build`` where it runs, and a package registry. Run it before a release.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SMOKE = """
import torch, vitrail
model = vitrail.load_model("vitrail:tiny")
images = torch.randn(2, 3, 128, 128)
plain = model(images)
with vitrail.merge(model, r=16) as merging:
    assert merging.tokens_per_layer()[-1] == 70
    assert model(images).shape == plain.shape
assert torch.equal(model(images), plain)
for name, shape in {"vitrail:audio": (1, 40, 64), "vitrail:video": (3, 8, 40, 40)}.items():
    model = vitrail.load_model(name)
    with vitrail.merge(model, r=4) as merging:
        model(torch.randn(1, *shape))
        assert merging.tokens_per_layer()[-1] < merging.tokens_per_layer()[0]
print("vitrail", vitrail.__version__, "works")
"""
NEEDED = (
    *(f"vitrail/weights/{name}/model.safetensors" for name in ("audio", "tiny", "video")),
    *(f"vitrail/weights/{name}/CARD.md" for name in ("audio", "tiny", "video")),
    "vitrail/report/page/style.css",
    "vitrail/web/page/index.html",
    "vitrail/py.typed",
)
"""Files that are no modules, and must be in the wheel."""


def build(folder: Path) -> tuple[Path, Path]:
    """Return the wheel and the source distribution."""
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)], check=True)
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


def check_contents(wheel: Path, source: Path) -> None:
    """Raise if files are missing or do not belong there."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    missing = [name for name in NEEDED if name not in names]
    strange = [name for name in names if not name.startswith(("vitrail/", "vitrail-"))]
    with tarfile.open(source) as archive:
        large = [one.name for one in archive.getmembers() if one.size > 20 * 2**20]
    if missing or strange or large:
        raise SystemExit(f"missing: {missing}; not ours: {strange}; too large: {large}")


def use(package: Path) -> None:
    """Install a package in an empty environment, and run it there."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        install = [str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), str(package)]
        subprocess.run(install, check=True)
        subprocess.run([str(python), "-c", SMOKE], check=True, cwd=folder)
        subprocess.run([str(python), "-m", "vitrail", "--version"], check=True, cwd=folder)


def main() -> None:
    """Build, check and use both packages."""
    with tempfile.TemporaryDirectory() as folder:
        packages = build(Path(folder))
        check_contents(*packages)
        for package in packages:
            use(package)


if __name__ == "__main__":
    main()
