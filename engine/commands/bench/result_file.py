"""What `penstock bench serve` leaves behind: the failures explained, and the result file."""

import argparse
import json
import math
import sys
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

from penstock.engine.commands.bench.calls import pair
from penstock.engine.commands.bench.load import Run
from penstock.engine.commands.bench.summary import details


def explain_failures(finished: Run) -> None:
    """Each kind of failure once, the most frequent first."""
    kinds = Counter(outcome.error for outcome in finished.outcomes if outcome.error)
    for error, count in kinds.most_common(10):
        print(f"{count} failed: {error[:300]}", file=sys.stderr)


def description(args: argparse.Namespace, model: str) -> dict[str, Any]:
    metadata = dict(pair("metadata", item) for item in args.metadata)
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.label or args.backend,
        "model_id": model,
        "tokenizer_id": None,
        "num_prompts": args.num_prompts,
        **metadata,
        "request_rate": "inf" if math.isinf(args.request_rate) else args.request_rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "structured_ratio": args.structured_ratio,
    }


def save(result: dict[str, Any], args: argparse.Namespace) -> Path:
    if not args.save_detailed:
        result = {name: value for name, value in result.items() if name not in details([])}
    model = result["model_id"].rstrip("/").rsplit("/", 1)[-1]
    limit = f"-concurrency{args.max_concurrency}" if args.max_concurrency is not None else ""
    name = args.result_filename or f"{result['label']}-{result['request_rate']}qps{limit}-{model}-{result['date']}.json"
    path = Path(args.result_dir or ".") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if args.append_result else "w") as file:
        file.write(json.dumps(result) + "\n")
    return path
