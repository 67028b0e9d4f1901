"""A CustomResourceDefinition as a JSON schema that is strict: what the API server would drop in silence is an error.

    python -m tests.launch.crds CRD.yaml > tests/launch/schemas/KIND.json       (from the repository's folder)

Of the definition are kept the types, required fields, enumerations, limits and patterns; not the sentences, and not the
rules in CEL. Equal parts are kept once, under $defs. The API server prunes fields that a definition does not have: here
no object takes another field. schemas/README.md says where the definitions come from.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

KEPT = {
    "type", "required", "enum", "items", "properties", "additionalProperties", "anyOf", "oneOf", "allOf", "not",
    "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "pattern", "minProperties", "maxProperties",
}  # fmt: skip
STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
# A definition leaves metadata to the API server.
METADATA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"}, "namespace": {"type": "string"}, "labels": STRINGS, "annotations": STRINGS,
        "generateName": {"type": "string"},
    },
    "additionalProperties": False,
}  # fmt: skip


def strict(schema: dict[str, Any], name: str = "") -> dict[str, Any]:
    if name == "metadata" and not schema.get("properties"):
        return METADATA
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            found[key] = {name: strict(child, name) for name, child in value.items()}
        elif key in ("anyOf", "oneOf", "allOf"):
            found[key] = [strict(child) for child in value]
        elif key in ("items", "not", "additionalProperties") and isinstance(value, dict):
            found[key] = strict(value)
        elif key in KEPT:
            found[key] = value
    if schema.get("x-kubernetes-int-or-string"):
        found.pop("type", None)
    open_ = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if found.get("type") == "object" and not open_:
        found["additionalProperties"] = False
    return found


def shared(schema: dict[str, Any]) -> dict[str, Any]:
    """Parts that come more than once, in one place."""
    counts: Counter[str] = Counter()

    def count(part: Any) -> None:
        if isinstance(part, dict):
            if "properties" in part:
                counts[json.dumps(part, sort_keys=True)] += 1
            for child in part.values():
                count(child)
        elif isinstance(part, list):
            for child in part:
                count(child)

    count(schema)
    names = {text: f"p{number}" for number, (text, times) in enumerate(counts.items()) if times > 1}

    def refer(part: Any, *, top: bool = False) -> Any:
        if isinstance(part, list):
            return [refer(child) for child in part]
        if not isinstance(part, dict):
            return part
        name = names.get(json.dumps(part, sort_keys=True)) if "properties" in part and not top else None
        return {"$ref": f"#/$defs/{name}"} if name else {key: refer(child) for key, child in part.items()}

    return refer(schema, top=True) | {
        "$defs": {name: refer(json.loads(text), top=True) for text, name in names.items()}
    }


def main(path: Path) -> None:
    definition = yaml.safe_load(path.read_text())
    (version,) = [one for one in definition["spec"]["versions"] if one["served"]]
    schema = shared(strict(version["schema"]["openAPIV3Schema"]))
    spec = definition["spec"]
    names = {"apiVersion": {"const": f"{spec['group']}/{version['name']}"}, "kind": {"const": spec["names"]["kind"]}}
    schema["properties"] |= names
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    print(json.dumps(schema, separators=(",", ":"), sort_keys=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
