"""Puts the HTTP side together."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException

from moe_serve.api import chat, completions, health, metrics_route, models, moe, tokenization
from moe_serve.api.auth import ApiKeyMiddleware
from moe_serve.api.body_limit import BodyLimitMiddleware
from moe_serve.api.engine import EngineClient
from moe_serve.api.errors import handle_error, handle_http_error
from moe_serve.api.metrics import ApiMetrics
from moe_serve.api.state import ApiState
from moe_serve.api.ticket import TicketMiddleware
from moe_serve.config import ServeConfig, parse_bytes
from moe_serve.errors import EngineError, RequestError
from moe_serve.tokenizer import Tokenizer

ROUTE_MODULES = (completions, chat, tokenization, models, moe, health, metrics_route)


def create_app(
    config: ServeConfig, engine: EngineClient, tokenizer: Tokenizer, model_names: list[str]
) -> FastAPI:
    """The app; its `ApiState` is `app.state.api`. The engine may still be starting.

    `model_names`: what the server answers to, the first being its name in answers without one.
    """
    assert model_names
    metrics = ApiMetrics(prefix=config.metrics_prefix, model_name=model_names[0], engine=engine)
    engine.on_stats = metrics.observe_step
    state = ApiState(
        config=config, engine=engine, tokenizer=tokenizer, model_names=model_names, metrics=metrics
    )
    app = FastAPI(title="moe_serve", version=health.VERSION, redirect_slashes=False)
    app.state.api = state
    for module in ROUTE_MODULES:
        app.include_router(module.router)
    for error_type in (RequestError, EngineError):
        app.add_exception_handler(error_type, handle_error)
    app.add_exception_handler(HTTPException, handle_http_error)
    # The last one added is the outermost.
    max_bytes = parse_bytes("max_body_bytes", config.max_body_bytes)
    app.add_middleware(BodyLimitMiddleware, max_bytes=max_bytes)
    if config.api_key is not None or config.admin_api_key is not None:
        app.add_middleware(
            ApiKeyMiddleware, api_key=config.api_key, admin_api_key=config.admin_api_key
        )
    app.add_middleware(TicketMiddleware, state=state)
    return app
