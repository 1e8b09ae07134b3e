#!/usr/bin/env bash
# More requests than memory, on the embedded model: bash examples/more_requests_than_memory.sh [FOLDER]
#
# 48 requests, some of them urgent, whose prompts begin alike, on engines with less and less room for them. Each run is
# compared with the first: whatever is shared, moved or taken away, tokens and log-probabilities stay the same.
set -euo pipefail
folder=${1:-$(mktemp -d)}
mkdir -p "$folder"
cd "$folder"

python > requests.jsonl << 'PYTHON'
import json

stem = "".join(f"def field_{number}(record):\n    return record[{number}]\n\n" for number in range(16))
for number in range(48):
    line = {
        "prompt": stem + f"def total_{number}(records",
        "max_tokens": 8 + number * 7 % 41,
        "temperature": 0.8 * (number % 2),
        "seed": number,
        "logprobs": 0,
        "priority": -5 if number % 12 == 11 else 0,
    }
    print(json.dumps(line))
PYTHON

run() { # NAME OPTIONS...
    local name=$1
    shift
    echo "== $name: $*"
    xla-engine run requests.jsonl -o "$name.jsonl" --overwrite --no-progress --fingerprint --max-model-len 512 "$@" 2>&1 |
        grep -E "^(wall|prefix|preempt|time to|slot occ)"
    [ "$name" = slots ] || xla-engine compare slots.jsonl "$name.jsonl" | tail -n 1
}

run slots --max-num-seqs 4 --no-enable-prefix-caching
run prefix_cache --max-num-seqs 4
run blocks --max-num-seqs 16 --num-blocks 24                     # of 64 tokens: what three slots of 512 take
run bytes --max-num-seqs 16 --kv-cache-memory-bytes 12000000
run no_room_on_the_host --max-num-seqs 4 --swap-space 0         # who loses its slot runs again
run turns --max-num-seqs 4 --policy round_robin --quantum 8 --step-log steps.jsonl

echo "== what each slot did: $folder/steps.html"
xla-engine timeline steps.jsonl -o steps.html
echo "== the same requests under other policies, and with other slots, by simulation"
xla-engine simulate steps.jsonl --policy fcfs --policy round_robin --max-num-seqs 4 --max-num-seqs 8
echo "== 2,000 heavy-tailed requests that come faster than four slots can serve them"
xla-engine simulate heavy-tailed --requests 2000 --cost steps.jsonl --rate 30 --policy priority --policy round_robin
