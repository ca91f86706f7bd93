# SPDX-License-Identifier: Apache-2.0
"""Makes the picture in docs/dashboard.md: an engine under load, and what Prometheus saw of it.

    python3 tools/run.py -- python tools/walk/traffic.py --svg docs/dashboard.svg

Takes some seven minutes. The engine has KV memory for three prompts at a time, and a pool for six.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from page import Block
from steps import ENGINE_READY, PROMETHEUS_READY
from terminal import Terminals

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
PORT, PROMETHEUS_PORT = 8000, 9090
PATIENCE_S = 300.0
BLOCK_BYTES = 128 * 30 * 3 * 64 * 2 * 2
"""128 tokens, 30 layers, 3 heads of 64, keys and values in bfloat16."""
PROMPT_BLOCKS = 12
GPU_BLOCKS = 3 * (PROMPT_BLOCKS + 1) + 1
POOL_PROMPTS = 6
USERS = 4
LONG_TOKENS = 400
CONFIG = {
    "kv_connector": "UMBPStoreConnector",
    "kv_connector_module_path": "umbp.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {
        "backend": "memory",
        "total_capacity_bytes": POOL_PROMPTS * PROMPT_BLOCKS * BLOCK_BYTES * 11 // 10,
    },
}
EVENTS = {"enable_kv_cache_events": True, "publisher": "zmq"}
ENGINE = f"""
VLLM_SERVER_DEV_MODE=1 vllm serve ~/.cache/umbp/SmolLM2-135M-Instruct --served-model-name walk \\
    --port {PORT} --max-model-len 4096 --max-num-seqs {USERS} --enforce-eager \\
    --num-gpu-blocks-override {GPU_BLOCKS} --kv-events-config '{json.dumps(EVENTS)}' \\
    --kv-transfer-config '{json.dumps(CONFIG)}'
"""
PROMETHEUS = f"""
cat > prometheus.yml <<END
global: {{scrape_interval: 1s}}
scrape_configs:
  - job_name: vllm
    static_configs: [{{targets: ['localhost:{PORT}']}}]
END
prometheus --config.file=prometheus.yml --storage.tsdb.path=prometheus-data \\
    --web.listen-address=localhost:{PROMETHEUS_PORT}
"""


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--svg", type=Path, required=True, help="where the picture goes")
    parser.add_argument("--phase-s", type=float, default=90.0, help="duration of each phase")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="umbp-walk-"))
    variables = Block("variables", "traffic.py", "bash", f"cd {folder}\n")
    terminals = Terminals(ROOT, folder, variables, words={}, environment=os.environ)
    try:
        prometheus = Block("prometheus", "traffic.py, PROMETHEUS", "bash", PROMETHEUS)
        terminals.start(prometheus, PROMETHEUS_READY)
        terminals.start(Block("engine", "traffic.py, ENGINE", "bash", ENGINE), ENGINE_READY)
        begin_s = time.monotonic()
        _run_phases(options.phase_s)
        time.sleep(5)  # What is left of the last phase.
        minutes = (time.monotonic() - begin_s) / 60
        drawn = subprocess.run(
            [
                *(sys.executable, ROOT / "tools" / "render_dashboard.py", "--svg", options.svg),
                *("--prometheus", f"http://localhost:{PROMETHEUS_PORT}"),
                *("--minutes", f"{minutes:.2f}", "--rate-seconds", "15"),
            ],
            check=False,
        )
    finally:
        terminals.close()
    shutil.rmtree(folder)
    return drawn.returncode


def _run_phases(phase_s: float) -> None:
    """Puts the load on, one phase after the other."""
    chosen = random.Random(0)
    _ask(phase_s, "six documents, which the pool holds", lambda: chosen.randrange(POOL_PROMPTS))
    _ask(phase_s, "twelve, which it does not hold", lambda: chosen.randrange(2 * POOL_PROMPTS))
    with ThreadPoolExecutor(USERS) as users:
        for seed in range(USERS):
            own = random.Random(seed)
            choose = lambda own=own: own.randrange(POOL_PROMPTS)  # noqa: E731
            users.submit(_ask, phase_s, f"user {seed} wants long answers", choose, LONG_TOKENS)
    print("a reset")
    _post("/reset_prefix_cache?reset_external=true", {})
    _ask(phase_s, "six documents again", lambda: chosen.randrange(POOL_PROMPTS))


def _ask(duration_s: float, what: str, choose: Callable[[], int], tokens: int = 12) -> None:
    """Asks about one document after the other, for a while."""
    print(what, flush=True)
    end_s = time.monotonic() + duration_s
    while time.monotonic() < end_s:
        number = choose()
        text = " ".join(
            f"On day {day} of year {number} the ferry leaves at {day % 12 + 6} o'clock."
            for day in range(1, 77)
        )
        question = {"role": "user", "content": f"{text} When does it leave on day 7?"}
        body = {"model": "walk", "messages": [question], "max_tokens": tokens, "temperature": 0}
        _post("/v1/chat/completions", body | {"ignore_eos": tokens == LONG_TOKENS})


def _post(path: str, body: dict[str, object]) -> None:
    request = urllib.request.Request(
        f"http://localhost:{PORT}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        answer.read()


if __name__ == "__main__":
    sys.exit(main())
