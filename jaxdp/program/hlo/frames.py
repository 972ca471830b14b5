"""Where instructions come from: the tables of stack frames before the code.

An instruction names a stack frame; a frame names a location and the frame that called
it; a location names a file, a function and a line.
"""

import re

SECTIONS = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


def frames(tables: list[str]) -> dict[str, str]:
    """`file:line` by stack frame, from the lines of the tables."""
    sections: dict[str, dict[str, str]] = {}
    section: dict[str, str] = {}
    for line in tables:
        number, _, value = line.partition(" ")
        if line in SECTIONS:
            section = sections.setdefault(line, {})
        elif number.isdigit():
            section[number] = value
    files, found = sections.get("FileNames", {}), {}
    for frame, value in sections.get("StackFrames", {}).items():
        location = dict(re.findall(r"(\w+)=(\d+)", value)).get("file_location_id", "")
        place = sections.get("FileLocations", {}).get(location, "")
        fields = dict(re.findall(r"(\w+)=(\d+)", place))
        if fields.get("file_name_id") in files:
            name = files[fields["file_name_id"]].strip('"')
            found[frame] = f"{name}:{fields.get('line', '?')}"
    return found
