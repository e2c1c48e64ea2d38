"""JSON schemas of the custom resources that we ship, which no Kubernetes schema covers.

Only the fields that our manifests use, as the operators' own definitions have them; any other field
is refused. So they find what is misspelt or in the wrong place, not what an operator makes of it.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
DURATION: Schema = {"type": "string", "pattern": r"^(\d+h)?(\d+m)?(\d+s)?$", "minLength": 2}
LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}


def _object(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


def _resource(api_version: str, spec: Schema) -> Schema:
    metadata = _object(
        {"name": TEXT}, {"labels": LABELS, "namespace": TEXT, "finalizers": _list(TEXT)}
    )
    return _object(
        {
            "apiVersion": {"const": api_version},
            "kind": TEXT,
            "metadata": metadata,
            "spec": spec,
        }
    )


_endpoint = _object({"port": TEXT, "path": TEXT}, {"interval": DURATION, "scrapeTimeout": DURATION})
_alert = _object(
    {"alert": {"type": "string", "pattern": "^[A-Z][A-Za-z]+$"}, "expr": TEXT},
    {
        "for": DURATION,
        "labels": LABELS,
        "annotations": _object({"summary": TEXT, "description": TEXT}),
    },
)
_source = _object({"repoURL": TEXT, "targetRevision": TEXT, "path": TEXT})
_flag: Schema = {"type": "boolean"}
_retry = _object(
    {
        "limit": {"type": "integer"},
        "backoff": _object(
            {"duration": DURATION, "factor": {"type": "integer"}, "maxDuration": DURATION}
        ),
    }
)

SCHEMAS = {
    "ServiceMonitor": _resource(
        "monitoring.coreos.com/v1",
        _object(
            {"selector": _object({"matchLabels": LABELS}), "endpoints": _list(_endpoint)},
            {"jobLabel": TEXT},
        ),
    ),
    "PrometheusRule": _resource(
        "monitoring.coreos.com/v1",
        _object({"groups": _list(_object({"name": TEXT, "rules": _list(_alert)}))}),
    ),
    "Application": _resource(
        "argoproj.io/v1alpha1",
        _object(
            {
                "project": TEXT,
                "destination": _object({"server": TEXT, "namespace": TEXT}),
                "sources": _list(_source),
            },
            {
                "syncPolicy": _object(
                    {"automated": _object({}, {"prune": _flag, "selfHeal": _flag})},
                    {
                        "syncOptions": _list({"type": "string", "pattern": "^[A-Za-z]+=[a-z]+$"}),
                        "retry": _retry,
                    },
                )
            },
        ),
    ),
}
"""Kind -> schema."""
