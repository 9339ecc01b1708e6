"""Bytes of a request body -> a checked request model. Everything wrong is a 400 with a name."""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from moe_serve.api.unsupported import check_supported
from moe_serve.errors import RequestError

Model = TypeVar("Model", bound=BaseModel)

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_MAX_SHOWN = 60


async def read_request(request: Request, model: type[Model]) -> Model:
    """The body as a `model`.

    Fields that are null count as absent, except those in `model.nullable`; fields nobody knows
    are ignored; fields that are known but not offered raise. The Content-Type does not matter.
    Of duplicate keys the last wins.
    """
    raw = await request.body()
    values = _without_nulls(_parse_object(raw), getattr(model, "nullable", frozenset()))
    known = {name: value for name, value in values.items() if name in model.model_fields}
    if _SURROGATE_ESCAPE.search(raw):
        _check_unicode(known)
    check_supported(values, known=model.model_fields.keys())
    try:
        return model.model_validate(known)
    except ValidationError as error:
        raise _explain(error) from None


def body_docs(path: str, model: type[BaseModel]) -> dict[str, Any]:
    """The request body of a POST route for the OpenAPI page, which FastAPI cannot see itself."""
    place = f"#/paths/{path.replace('/', '~1')}/post/requestBody/content/application~1json/schema"
    schema = model.model_json_schema(ref_template=place + "/$defs/{model}")
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


def _parse_object(raw: bytes) -> dict[str, Any]:
    if not raw.strip():
        raise RequestError("the body is empty; it must be a JSON object")
    try:
        # Not json.loads(bytes), which lets invalid UTF-8 through. NaN and Infinity pass here, so
        # that the check of the field that holds them can name it.
        value = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise RequestError("the body is not usable JSON: nested too deeply") from None
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, not {type(value).__name__}")
    return value


def _without_nulls(values: dict[str, Any], nullable: frozenset[str]) -> dict[str, Any]:
    return {k: v for k, v in values.items() if v is not None or k in nullable}


def _check_unicode(values: dict[str, Any]) -> None:
    """JSON can escape half of a surrogate pair, which is no character and cannot be sent back."""
    for name, value in values.items():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise RequestError(
                f"{name} holds half of a surrogate pair, which is not a character", param=name
            ) from None


def _explain(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False)[0]
    location = first["loc"]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    path = path.removeprefix(".")
    param = str(location[0])
    if first["type"] == "missing":
        return RequestError(f"{path} is missing", param=param)
    what = str(first["msg"]).removeprefix("Input ")
    return RequestError(f"{path} {_shorten(first['input'])} {what}", param=param)


def _shorten(value: object) -> str:
    text = repr(value) if isinstance(value, str | int | float | bool) else type(value).__name__
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
