"""Two thousand random JSON schemas and a random model: every answer is JSON of its schema, with drafts and without."""

from __future__ import annotations

import json
import random
import string
from typing import Any

import jsonschema
import pytest

from dsa_engine import LLM, SamplingParams

COUNT = 2000
PATTERNS = ("^[a-d]{1,5}$", "^x", "[0-9]$", "^(yes|no)$", r"^\d{2}-\w?$")


def schema_of(rng: random.Random, depth: int = 0) -> Any:
    kinds = ["integer", "number", "string", "boolean", "null", "enum", "const", "types", "ref"]
    kinds += ["object", "array", "anyOf", "oneOf", "tuple", "allOf", "map"] * (2 if depth < 3 else 0)
    kind = rng.choice(kinds if depth else ["object"])
    low, count = rng.randint(-50, 50), rng.randint(0, 3)
    more = lambda: schema_of(rng, depth + 1)  # noqa: E731
    match kind:
        case "integer":
            choices = [{"minimum": low, "maximum": low + count}, {"multipleOf": 1 + count, "minimum": 0, "maximum": 99}]
            return {"type": "integer", **rng.choice([*choices, {"exclusiveMaximum": low, "minimum": low - 9}])}
        case "number":
            return {"type": "number", "minimum": low, rng.choice(["maximum", "exclusiveMaximum"]): low + 0.5 + count}
        case "string":
            length = {"minLength": count, "maxLength": count + 4}
            return {"type": "string"} | rng.choice([length, {"pattern": rng.choice(PATTERNS), "maxLength": 9}])
        case "enum":
            return {"enum": rng.sample([1, -2.5, "a", 'q"\\', None, True, ["x"], {"k": [0]}, "ä\n"], count + 1)}
        case "const":
            return {"const": rng.choice([3, "c", None, {"a": {}}, [[]]])}
        case "types":
            return {"type": rng.sample(["null", "boolean", "string"], 2), "maxLength": 3}
        case "ref":
            return {"$ref": f"#/$defs/{rng.choice('AB')}"}
        case "array":
            return {"type": "array", "items": more(), "minItems": count // 2, "maxItems": count}
        case "tuple":
            items = [more() for _ in range(count + 1)]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
        case "anyOf":
            return {"anyOf": [more() for _ in range(count + 1)]}
        case "oneOf":
            properties = [{"k": {"const": f"k{i}"}, "v": more()} for i in range(count + 1)]
            closed = {"type": "object", "required": ["k", "v"], "additionalProperties": False}
            return {"oneOf": [closed | {"properties": one} for one in properties]}
        case "allOf":
            part = {"type": "object", "properties": {"a": more(), "b": more()}, "additionalProperties": False}
            return {"allOf": [part, {"required": rng.sample("ab", 1)}]}
        case "map":
            return {"type": "object", "patternProperties": {"^k[0-9]$": more()}, "additionalProperties": False}
        case "object":
            names = rng.sample([*string.ascii_lowercase[:6], "a b", 'q"', "größe"], count + (depth == 0))
            required = [name for name in names if rng.random() < 0.6]
            properties = {name: more() for name in names}
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": kind}


def random_schema(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    defs = {"A": {"type": "integer", "minimum": 0, "maximum": 9}, "B": {"enum": ["u", "v"]}}
    return schema_of(rng) | {"$defs": defs}


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [0, 2])
def test_every_answer_is_json_of_its_schema(drafts: int) -> None:
    options: dict[str, Any] = {"speculative_config": {"num_speculative_tokens": drafts}} if drafts else {}
    schemas, refused, params = [], [], []
    for seed in range(drafts * COUNT, drafts * COUNT + COUNT // 2):
        schemas.append(random_schema(seed))
        form = {"json": schemas[-1], "disable_any_whitespace": seed % 5 < 4}
        kind = {"temperature": 0.0} if seed % 5 == 0 else {"temperature": 1.5, "seed": seed}
        params.append(SamplingParams(**kind, max_tokens=300, structured_outputs=form))  # type: ignore[arg-type]
        try:
            assert params[-1].structured_outputs is not None
            params[-1].structured_outputs.source()
        except ValueError as error:  # two parts of an allOf or a oneOf that cannot be joined
            refused.append(str(error))
            del schemas[-1], params[-1]
    assert len(refused) < COUNT / 20, refused
    with LLM("demo-random", device="cpu", max_model_len=1024, cache_memory="64MiB", progress=False, **options) as llm:
        outputs = [one.outputs[0] for one in llm.generate([[5, 6, 7]] * len(params), params, use_tqdm=False)]
    whole = 0
    for schema, output in zip(schemas, outputs, strict=True):
        assert output.finish_reason in ("stop", "length"), output.error
        if output.finish_reason == "stop":
            jsonschema.validate(json.loads(output.text), schema)
            whole += 1
    print(f"{drafts} drafts: {whole} whole of {len(outputs)}, {len(refused)} refused")
    assert whole > 0.9 * len(outputs), "the others were cut off"
