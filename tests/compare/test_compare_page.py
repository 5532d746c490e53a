"""The page: one small file without outside references, whose numbers are those of the results."""

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from compare_results import result

from demopt.compare import page
from demopt.compare.catalogue import METHODS
from demopt.compare.results import exchanges
from demopt.compare.run import Source
from demopt.compare.scale import Scale
from demopt.compare.studies import STUDIES, chosen
from demopt.compare.sweep import Plan
from demopt.compare.table import bytes_text, loss_text, seconds_text
from demopt.compare.verdict import sentences
from demopt.simulate.method import Fleet

MOST_BYTES = 1_000_000
RESULTS = [
    result("local </script> & h5", "local", [1.89, 1.91], sent=12_500, received=13_000),
    result("adamw", "adamw", [1.98, 2.02], sent=1_250_000, seconds=0.02),
    result("sgd", "sgd", [None, 2.5], workers=8),
]


class Reader(HTMLParser):
    """Tags, addresses, cells of the table of results by row, and scripts."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.addresses, self.ids, self.rows, self.scripts = [], [], [], [], []
        self._open = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append(tag)
        self.ids += [given["id"]] if "id" in given else []
        self.addresses += [
            given[name] for name in ("src", "href", "srcset", "data", "action", "poster") if name in given
        ]
        self._open = "" if tag not in ("td", "span", "script") else self._open if tag == "span" else tag
        if tag == "tr" and "data-row" in given:
            self.rows.append({"class": given.get("class", ""), "cells": []})
        if tag == "td" and self.rows:
            self.rows[-1]["cells"].append("")
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._open = "" if tag in ("td", "script") else self._open

    def handle_data(self, data):
        if self._open == "td" and self.rows:
            self.rows[-1]["cells"][-1] += data
        if self._open == "script":
            self.scripts[-1] += data


def rendered(results, study="methods"):
    facts = page.Facts(428_672, "a text", ["a machine"], "a date", ["a version"], runs=9)
    return page.render(Plan(chosen(study, []), Scale(), Source("text"), seeds=(0, 1)), results, facts)


@pytest.fixture(scope="module")
def html():
    return rendered(RESULTS)


@pytest.fixture(scope="module")
def read(html):
    return Reader(html)


def test_page_is_one_file_that_refers_to_nothing_outside(html, read):
    assert read.addresses == []
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(read.tags)
    assert not re.search(r"https?:|//[a-z]|url\(|@import|import\(|fetch\(|XMLHttp|WebSocket|eval\(", html)
    assert "default-src 'none'" in html  # the browser, too, refuses to fetch anything


def test_page_of_the_largest_study_is_under_one_megabyte():
    count, study = max((len(study.entries), name) for name, study in STUDIES.items())
    one = result("a name of the usual length", "demo", [1.9, 2.0, 2.1])
    one = dataclasses.replace(one, curve=one.curve * 4, commands=one.commands * 3, tried=[(1e-3, 1.2345678)] * 11)
    many = [dataclasses.replace(one, name=f"{one.name} {number}") for number in range(count)]
    assert len(rendered(many, study).encode()) < MOST_BYTES / 4


def test_page_numbers_are_those_of_the_results(read):
    ordered = sorted(RESULTS, key=lambda each: each.mean)
    assert len(read.rows) == len(RESULTS)
    for row, each in zip(read.rows, ordered, strict=True):
        name, loss, sent, received, step, *_, computing, workers = (
            " ".join(cell.split()) for cell in row["cells"][:12]
        )
        assert name.startswith(each.name)
        assert (loss, sent, received) == (loss_text(each), bytes_text(each.sent_bytes), bytes_text(each.received_bytes))
        assert (step, computing) == (seconds_text(each.seconds(1e8)), seconds_text(each.step_seconds))
        assert workers == str(each.workers)


def test_page_plots_are_of_the_results(read):
    told = json.loads(read.scripts[0])
    ordered = sorted(RESULTS, key=lambda each: each.mean)
    assert told["link"] == 1e8
    for row, each in zip(told["rows"], ordered, strict=True):
        assert row["name"] == each.name
        assert row["mean"] == (None if each.losses[0] is None else each.mean)
        assert (row["sent"], row["received"], row["seconds"]) == (
            each.sent_bytes,
            each.received_bytes,
            each.step_seconds,
        )
        assert row["curve"] == [list(dataclasses.astuple(point)) for point in each.curve]


def test_page_has_the_verdict(read, html):
    from markupsafe import escape

    for sentence in sentences(RESULTS):
        assert f"<p>{escape(sentence)}</p>" in html


def test_page_marks_demopt_and_the_baselines(read):
    assert [row["class"] for row in read.rows] == ["ours", "", ""]
    assert read.rows[0]["cells"][0].endswith("demopt")
    assert read.rows[1]["cells"][0].endswith("AdamW-DDP")


def test_page_of_demopt_alone_marks_no_row():
    rows = Reader(rendered([result("a", "demo", [1.0, 1.1]), result("b", "local", [1.0, 1.1])], "top-k")).rows
    assert [row["class"] for row in rows] == ["", ""]


def test_page_script_finds_what_it_looks_for(html, read):
    script = read.scripts[1]
    places = re.findall(r'find\("([\w-]+)"\)', script) + re.findall(r'\bid: "([\w-]+)"', script)
    assert set(places) <= set(read.ids)
    assert len(read.ids) == len(set(read.ids))
    keys = set(re.findall(r'data-key="(\w+)"', html))
    assert keys <= {"step", "at", "reaches", *json.loads(read.scripts[0])["rows"][0]}


def test_page_script_and_style_have_nothing_that_the_template_language_would_take():
    for file in ("page.js", "page.css"):
        assert not re.search(r"\{\{|\{%|\{#", (Path(page.__file__).with_name("template") / file).read_text())


@pytest.mark.parametrize("name", [name for name, kind in METHODS.items() if kind.interval])
def test_exchanges_are_those_that_the_method_makes(name, matrix, gradients, walk):
    method = METHODS[name].make(Fleet(matrix, world_size=3), **{METHODS[name].interval: 2})
    sent = [walk(method, gradients[step % 2], 1e-3).sent_bytes for step in range(4)]
    method.close()
    assert [count > 0 for count in sent] == [False, True, False, True]
    assert torch.isfinite(matrix.weight).all()


def test_exchanges_are_known_of_every_entry():
    rates = {entry.name: exchanges(entry) for study in STUDIES.values() for entry in study.entries}
    assert (rates["diloco h50"], rates["local h5"], rates["adamw"]) == (0.02, 0.2, 1.0)
    assert all(0 < rate <= 1 for rate in rates.values())
