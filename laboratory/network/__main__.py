"""Runs a scenario, and prints a line of JSON for each of its links: python -m laboratory.network FILE."""

import argparse
import datetime
import json
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path

from laboratory.network.machines import MissingError, sweep
from laboratory.network.scenario import ScenarioError, read, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenario", type=Path, nargs="?", help="a file of laboratory/network/scenarios")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--machines", type=int, help="instead of the scenario's number")
    parser.add_argument("--sweep", action="store_true", help="remove the machines of processes that were killed")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if arguments.scenario is None and not arguments.sweep:
        parser.error("give a scenario, such as laboratory/network/scenarios/rates.toml")
    try:
        if arguments.sweep:
            sweep()
            return
        scenario = read(arguments.scenario)
        scenario = replace(scenario, machines=arguments.machines or scenario.machines)
        results = run(scenario)
    except MissingError as error:
        print(f"no machines here: they need {error}. Nothing was run.")
        return
    except ScenarioError as error:
        parser.error(str(error))
    for result in results:
        print(json.dumps(result))
    if arguments.out:
        record = {"scenario": asdict(scenario), "date": datetime.date.today().isoformat(), "results": results}
        arguments.out.write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
