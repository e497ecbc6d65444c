"""Fails for an installed package with a known vulnerability, and says so where the lists of them cannot be reached: by
itself pip-audit then finds nothing, and is content."""

from __future__ import annotations

import json
import subprocess
import sys


def main() -> int:
    """The exit code."""
    command = [sys.executable, "-m", "pip_audit", "--skip-editable", "--progress-spinner=off", "--format=json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, LookupError):
        packages = []
    looked_up = [package for package in packages if "vulns" in package]
    if not looked_up:
        told = [package["skip_reason"] for package in packages] or done.stderr.strip().splitlines()[-1:]
        why = told[0] if told else "no word why"
        print(f"NOT AUDITED: none of {len(packages)} packages could be looked up from here ({why})")
        return 0
    found = [(package, vulnerability) for package in looked_up for vulnerability in package["vulns"]]
    for package, vulnerability in found:
        fixed = ", ".join(vulnerability["fix_versions"]) or "no version yet"
        print(f"{package['name']} {package['version']}: {vulnerability['id']}, mended in {fixed}")
    print(f"{len(looked_up)} of {len(packages)} packages looked up, {len(found)} known vulnerabilities")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
