"""GET /v1/models: what this server serves."""

from __future__ import annotations

from aiohttp import web

from cuengine.api.answers import json_answer
from cuengine.api.protocol import ModelCard, ModelList
from cuengine.api.state import ServerState


async def list_models(request: web.Request, state: ServerState) -> web.Response:
    return json_answer(ModelList([_card(state, name) for name in state.model_names]))


async def show_model(request: web.Request, state: ServerState) -> web.Response:
    return json_answer(_card(state, state.check_model(request.match_info["model"])))


def _card(state: ServerState, name: str) -> ModelCard:
    engine = state.engine
    return ModelCard(
        id=name,
        created=state.created,
        root=state.model_names[0],
        max_model_len=engine.max_model_len,
    )
