"""Print the first rows of an output file, one line each: the id, and the answer or the error."""

import json
import sys
from itertools import islice
from pathlib import Path

SHOWN = 5

with Path(sys.argv[1]).open(encoding="utf-8") as rows:
    for row in map(json.loads, islice(rows, SHOWN)):
        if row["error"] is None:
            text = row["response"]["body"]["choices"][0]["message"]["content"]
        else:
            text = f"{row['error']['code']}: {row['error']['message']}"
        print(f"{row['custom_id']}: {' '.join(text.split())[:100]}")
