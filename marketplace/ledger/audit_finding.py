"""What a check of the audit gives back."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Checked:
    """How many things a check looked at, and a sentence for each that was wrong."""

    count: int = 0
    findings: list[str] = field(default_factory=list)

    def wrong(self, finding: str) -> None:
        """Add a finding."""
        self.findings.append(finding)
