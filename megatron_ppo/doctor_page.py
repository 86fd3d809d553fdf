"""What doctor found, as data, as text and as JSON. The checks are in ``doctor_checks.py`` and ``doctor_links.py``.

Text, one finding a line; what is broken or worth a look carries a mark and its remedy below it::

    == versions
       torch                 2.13.0+cpu
    !! apex                  the package of that name in the Python Package Index, not NVIDIA's
       -> pip uninstall apex
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["ok", "note", "broken"]

_MARKS: dict[Status, str] = {"ok": "  ", "note": " ?", "broken": "!!"}
_NAME_WIDTH = 24
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|JWT|AUTH|HEADERS|COOKIE|JOB_CONFIG", re.IGNORECASE)
_LOGIN_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")


@dataclass(frozen=True)
class Finding:
    """One line of the page."""

    name: str
    value: str
    status: Status = "ok"
    """note: may matter, ends with exit code 0. broken: a run would fail or compute something else; exit code 1."""
    remedy: str = ""


@dataclass(frozen=True)
class Section:
    """Findings of one check, in the order in which they were made."""

    title: str
    findings: list[Finding]

    def to_text(self) -> str:
        """The section as lines of text, the last one without its line break."""
        lines = [f"== {self.title}"]
        for finding in self.findings:
            first, *rest = hide_secrets(finding.value).splitlines() or [""]
            lines.append(f"{_MARKS[finding.status]} {finding.name:<{_NAME_WIDTH}} {first}".rstrip())
            lines += [f"{'':<{_NAME_WIDTH + 4}}{line}".rstrip() for line in rest]
            if finding.remedy:
                lines.append(f"   -> {finding.remedy}")
        return "\n".join(lines)


def run_check(title: str, check: Callable[[], list[Finding]]) -> Section:
    """The section of one check. A check that raises has found something too: its error, in words."""
    try:
        return Section(title, check())
    except Exception as error:  # whatever it is, the other checks still have something to say
        what = f"this check failed: {type(error).__name__}: {error}"
        return Section(title, [Finding("check", what, "broken", "mend what the error names, or report this page: a check should not fail")])


def worst(sections: Sequence[Section], status: Status) -> list[tuple[str, Finding]]:
    """(section, finding) of every finding with that status."""
    return [(section.title, finding) for section in sections for finding in section.findings if finding.status == status]


def to_json(sections: Sequence[Section]) -> str:
    """The whole page for programs: ``{"num_broken": .., "num_notes": .., "sections": [{"title": .., "findings": [..]}]}``."""
    page = {
        "num_broken": len(worst(sections, "broken")),
        "num_notes": len(worst(sections, "note")),
        "sections": [asdict(section) for section in sections],
    }
    return hide_secrets(json.dumps(page, indent=1))


def from_json(text: str) -> list[Section]:
    """Inverse of ``to_json``."""
    return [Section(part["title"], [Finding(**finding) for finding in part["findings"]]) for part in json.loads(text)["sections"]]


def summary(sections: Sequence[Section]) -> str:
    """The last lines of the page: what to look at first."""
    broken, notes = worst(sections, "broken"), worst(sections, "note")
    lines = [f"doctor: {len(broken)} broken, {len(notes)} to look at"]
    lines += [f"   {title}: {finding.name}: {hide_secrets(finding.value).splitlines()[0]}" for title, finding in broken]
    return "\n".join(lines)


def is_secret(name: str) -> bool:
    """Whether a variable of that name may hold a secret, and is neither printed nor named."""
    return _SECRET.search(name) is not None


def hide_secrets(text: str) -> str:
    """Logins inside of addresses (``https://name:word@host``) become ``***``."""
    return _LOGIN_IN_URL.sub("***@", text)
