"""The documentation: all pages are in the navigation, all links lead somewhere, and the site builds."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("", "docs", "experiments", "benchmarks", "src/vitrail/weights")
PAGES = sorted({path for folder in FOLDERS for path in (ROOT / folder).glob("**/*.md" if folder else "*.md")})
LINK = re.compile(r"(?<!`)\]\((?P<path>[^)\s#]*)(?:#(?P<anchor>[^)\s]*))?(?:\s[^)]*)?\)")
CODE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and mkdocs derive them."""
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    headings = [match[1] for match in re.finditer(r"^#{1,6} (.+)$", text, re.MULTILINE)]
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower().replace("`", "") for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", [str(page.relative_to(ROOT)) for page in PAGES])
def test_links_of_a_page_lead_somewhere(page: str) -> None:
    file = ROOT / page
    broken = []
    for link in LINK.finditer(CODE.sub("", file.read_text(encoding="utf-8"))):
        if "://" in link["path"] or link["path"].startswith("mailto:"):
            continue
        target = (file.parent / link["path"]).resolve() if link["path"] else file
        if not target.exists() or (link["anchor"] and target.suffix == ".md" and link["anchor"] not in anchors(target)):
            broken.append(link[0])
    assert broken == []


def listed(entries: object) -> list[str]:
    """Return all pages of a navigation."""
    if isinstance(entries, str):
        return [entries]
    values = entries.values() if isinstance(entries, dict) else entries
    return [page for entry in values for page in listed(entry)]  # type: ignore[attr-defined]


def test_every_page_is_in_the_navigation() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").glob("**/*.md")}
    assert pages <= set(listed(config["nav"]))


def test_links_lead_somewhere_on_the_site() -> None:
    """The site has fewer files than a checkout: a link to a file of the repository may be broken there alone."""
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "tools" / "site_pages.py")
    assert spec is not None
    assert spec.loader is not None
    site_pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site_pages)
    docs = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("**/*") if path.is_file()}
    sources = {site_pages.site_uri(path): path for path in {*docs, *site_pages.outside()}}
    generated = {f"reference/{name}.md" for name in ("index", "commands", *site_pages.PACKAGES)}
    broken = []
    for source in sorted(path for path in sources.values() if path.endswith(".md")):
        for link in LINK.finditer(CODE.sub("", (ROOT / source).read_text(encoding="utf-8"))):
            if not link["path"] or "://" in link["path"] or link["path"].startswith("mailto:"):
                continue
            target = site_pages.site_uri(os.path.normpath(Path(source).parent / link["path"]))
            if not {target, f"{target}/README.md"} & {*sources, *generated}:
                broken.append(f"{source}: {link[0]}")
    assert broken == []


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="building the site needs the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list((tmp_path / "site").glob("**/*.html"))
    images = [
        (page, source)
        for page in pages
        for source in re.findall(r'<img[^>]* src="([^":/][^":]*)"', page.read_text("utf-8"))
    ]
    assert len(images) > 30
    assert [str(page) for page, source in images if not (page.parent / source).is_file()] == []
    commands = (tmp_path / "site" / "reference" / "commands" / "index.html").read_text(encoding="utf-8")
    assert "--keep" in commands
    merge = (tmp_path / "site" / "reference" / "vitrail" / "index.html").read_text(encoding="utf-8")
    assert 'id="vitrail.merge"' in merge
