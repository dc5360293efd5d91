"""Streams a document into an open prompt, which a Headrace server computes as it comes, and prints the first token.

producer | python stream_document.py http://localhost:8000 "Summarize this report."
python stream_document.py http://localhost:8000 "Summarize this report." report.txt --chars 2000
"""

import argparse
import sys
import time

import httpx

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("url")
parser.add_argument("instruction")
parser.add_argument("file", nargs="?", type=argparse.FileType(encoding="utf-8"), default=sys.stdin)
parser.add_argument("--chars", type=int, default=1000, help="characters of each piece")
given = parser.parse_args()

with httpx.Client(base_url=given.url, timeout=600) as http:
    state = (
        http.post("/v1/prefill", json={"open": True, "prompt": given.instruction + "\n\n"}).raise_for_status().json()
    )
    prompt = f"/v1/prefill/{state['id']}"
    while part := given.file.read(given.chars):
        state = http.patch(prompt, json={"append": part}).raise_for_status().json()
        print(f"{state['computed']} of {state['tokens']} tokens computed", file=sys.stderr)
    began = time.perf_counter()
    body = {"handoff": "none", "temperature": 0}
    answer = http.post(f"{prompt}/commit", json=body).raise_for_status().json()
    print(f"first token after {time.perf_counter() - began:.3f} s", file=sys.stderr)
    print(answer["first_token"]["text"])
