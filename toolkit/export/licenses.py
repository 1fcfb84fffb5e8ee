"""A license as the Hub's cards state it: one of its identifiers, or `other` with a name."""

import re

# https://huggingface.co/docs/hub/repositories-licenses; a newer one becomes `other` with its name, which the Hub takes as well.
_TEXT = """
    afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0
    bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5 cc-by-3.0
    cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0
    cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0 cdla-permissive-2.0 cdla-sharing-1.0
    creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 gemma gfdl gpl gpl-2.0
    gpl-3.0 h-research intel-research isc lgpl lgpl-2.1 lgpl-3.0 lgpl-lr llama2 llama3 llama3.1 llama3.2 llama3.3 llama4
    lppl-1.3c mit mpl-2.0 ms-pl ncsa odbl odc-by ofl-1.1 openrail openrail++ osl-3.0 pddl postgresql unknown unlicense wtfpl
    zlib
"""
IDENTIFIERS = frozenset(_TEXT.split())


def license_fields(license: str, base: str | None = None) -> dict[str, str]:
    """The fields of a card's front matter for a license; `base` is the repository that states it, for its link."""
    if license in IDENTIFIERS:
        return {"license": license}
    named = {"license": "other", "license_name": re.sub(r"[^a-z0-9.-]+", "-", license.lower()).strip("-") or "unnamed"}
    return named | ({"license_link": f"https://huggingface.co/{base}"} if base else {})
