#!/usr/bin/env python3
"""A process whose locale has decimal commas: settings are read, and texts are written, with points. localedef makes the locale."""
import subprocess
import tempfile

from process import Skip, clean_environment, expect, helper, main, need, run


def test_a_locale_with_decimal_commas():
    need("localedef")
    with tempfile.TemporaryDirectory() as folder:
        made = subprocess.run(["localedef", "-c", "-i", "de_DE", "-f", "UTF-8", folder + "/de_DE.UTF-8"],
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        result = run(helper("commas"), env=clean_environment(
            LOCPATH=folder, LC_ALL="de_DE.UTF-8", MLFAB_GAMMA="0.5", MLFAB_BETA1="0.75", MLFAB_WORKERS=1, MLFAB_RANK=0))
    if result.code == 77:
        raise Skip("no locale with decimal commas can be made (localedef ended with %d)" % made.returncode)
    said = dict(line.split(": ", 1) for line in result.out.splitlines())
    expect(result.code == 0 and said["environment"] == "done" and said["read"] == "1", "the environment", result)
    expect(said["point"] == "done" and said["set"] == "1", "a setting with a point", result)
    expect("not a number" in said["comma"] and "0,25" in said["comma"], "a comma is refused", result)
    expect(said["filter"] == "done" and said["filtered"] == "1", "a filter's setting", result)
    expect("-0.5" in said["real"], "a real in an error", result)
    expect(said["own"] == "0,5", "the process keeps its locale", result)


if __name__ == "__main__":
    main(globals())
