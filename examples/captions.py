# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # A folder of pictures becomes a table
#
# One row for each file, with the model's answer or the reason why there is none. This notebook runs without a network,
# so its model is a tiny SmolVLM of random weights: it reads the pictures, and what it writes about them means nothing.
# For real captions, set `model = "HuggingFaceTB/SmolVLM-256M-Instruct"` (0.5 GB from the Hugging Face hub); nothing
# else changes.

# %%
from pathlib import Path
from tempfile import mkdtemp

from tiny_smolvlm import make

work = Path(mkdtemp())
model = make(work / "tiny_smolvlm")

# %% [markdown]
# ## Some pictures
# Two charts, one of them twice, a thumbnail, and a file that is no picture.

# %%
from PIL import Image, ImageDraw

scans = work / "scans"
scans.mkdir()
for name, heights in (("sales.png", (20, 35, 50)), ("costs.png", (45, 25, 10))):
    chart = Image.new("RGB", (90, 60), "white")
    for bar, height in enumerate(heights):
        ImageDraw.Draw(chart).rectangle((10 + 26 * bar, 60 - height, 28 + 26 * bar, 60), fill="steelblue")
    chart.save(scans / name)
(scans / "sales_again.png").write_bytes((scans / "sales.png").read_bytes())
chart.resize((16, 16)).save(scans / "thumbnail.png")
(scans / "broken.png").write_bytes(b"not a picture")
chart

# %% [markdown]
# ## The table of questions
# `xla-engine run` reads CSV, TSV, Parquet and Arrow files. A column names the pictures; Parquet files may also hold
# their bytes.

# %%
import csv

with open(work / "questions.csv", "w", newline="") as file:
    rows = csv.writer(file)
    rows.writerow(["file", "question"])
    rows.writerows([path.name, "What is shown here?"] for path in sorted(scans.iterdir()))
print((work / "questions.csv").read_text())

# %% [markdown]
# ## The run
# In a shell this is one line. Requests may read files of one folder only, the one that is named. `--resume` goes on
# after a crash, and `--dry-run` first counts tiles and tokens.

# %%
import subprocess
import sys

options = f"""--model {model} --allowed-local-media-path {scans}
    --image-column file --prompt-column question --chat --keep-columns file
    --max-tokens 12 --temperature 0 --dtype float32 --max-model-len 256 --max-num-seqs 4""".split()
command = [
    sys.executable,
    "-m",
    "xla_engine",
    "run",
    work / "questions.csv",
    "-o",
    work / "captions.csv",
    *options,
]
done = subprocess.run(command, stderr=subprocess.DEVNULL)
"some rows have errors" if done.returncode else "all rows have answers"

# %% [markdown]
# ## The table of answers
# A broken file costs one row. Equal pictures have equal hashes, and equal answers, whatever else was running.

# %%
with open(work / "captions.csv", newline="") as file:
    answers = {row["file"]: row for row in csv.DictReader(file)}
for name, row in answers.items():
    print(f"{name:16}", row["num_input_tokens"] or "-", row["error"] or repr(row["generated_text"]))

# %%
first, again = answers["sales.png"], answers["sales_again.png"]
first["images_sha256"] == again["images_sha256"], first["generated_text"] == again["generated_text"]
