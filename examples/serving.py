"""Start a server, ask it, and stop it: `python examples/serving.py` (needs the extra `serve`)."""

import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from openai import OpenAI

MODEL = "smollm2-135m"


def main() -> None:
    tool = Path(sys.executable).with_name("kvcache-compress")
    server = subprocess.Popen([tool, "serve", MODEL, "--memory", "128MiB", "--port", "8124"])
    try:
        wait_for("http://localhost:8124/health", server)
        client = OpenAI(base_url="http://localhost:8124/v1", api_key="none")
        stream = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "What is the capital of France?"}], max_tokens=40,
            temperature=0, stream=True,
        )  # fmt: skip
        for part in stream:
            print(part.choices[0].delta.content or "", end="", flush=True)
        print()
    finally:
        server.terminate()
        server.wait(60)


def wait_for(address: str, server: subprocess.Popen[bytes]) -> None:
    """Wait until a server answers; raises `RuntimeError` if it has stopped instead."""
    while True:
        try:
            urllib.request.urlopen(address).close()
            return
        except OSError:
            if server.poll() is not None:
                raise RuntimeError("the server did not start") from None
            time.sleep(0.2)


if __name__ == "__main__":
    main()
