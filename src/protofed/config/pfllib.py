"""A PFLlib or HtFLlib command line as an experiment, naming everything that has no counterpart."""

import difflib
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from protofed.config.experiment import Experiment
from protofed.config.schema import fields
from protofed.errors import UserError
from protofed.methods import METHODS

SCRIPT = "main.py"
# Their flags: the short one, the long one, and the value it has if it is not given.
FLAGS: dict[str, tuple[str, Any]] = {
    "data": ("dataset", "MNIST"), "m": ("model", "CNN"), "algo": ("algorithm", "FedAvg"), "gr": ("global_rounds", 2000),
    "ls": ("local_epochs", 1), "lbs": ("batch_size", 10), "lr": ("local_learning_rate", 0.005),
    "ld": ("learning_rate_decay", False), "ldg": ("learning_rate_decay_gamma", 0.99), "nc": ("num_clients", 20),
    "jr": ("join_ratio", 1.0), "eg": ("eval_gap", 1), "dev": ("device", "cuda"), "did": ("device_id", "0"),
    "lam": ("lamda", 1.0), "mu": ("mu", 0.0), "tau": ("tau", 1.0), "pls": ("plocal_epochs", 1),
    "fte": ("fine_tuning_epochs", 10), "slr": ("server_learning_rate", 1.0), "se": ("server_epochs", 1000),
    "mart": ("margin_threthold", 100.0), "nnc": ("num_new_clients", 0), "lrp": ("p_learning_rate", 0.01),
}  # fmt: skip
# Flags that have no counterpart, and why, or what to use instead.
WITHOUT: dict[str, tuple[str, str]] = {
    "go": ("goal", "the run's folder is --out"), "sfn": ("save_folder_name", "the run's folder is --out"),
    "nb": ("num_classes", "the data says it"), "ncl": ("num_classes", "the data says it"),
    "t": ("times", "each seed is a run: protofed compare --seeds 0,1,2"), "pv": ("prev", "each seed is a run"),
    "ab": ("auto_break", "see [stopping], which goes by validation samples instead of the test set"),
    "tc": ("top_cnt", "see [stopping]"), "rjr": ("random_join_ratio", "as many clients take part in every round"),
    "ften": ("fine_tuning_epoch_new", "newcomers train for join.steps steps, not epochs"),
    "cdr": ("client_drop_rate", "all clients of a round answer"),
    "tsr": ("train_slow_rate", "it makes clients wait, and changes no result"),
    "ssr": ("send_slow_rate", "it makes clients wait, and changes no result"),
    "ts": ("time_select", "see [selection]"), "tth": ("time_threthold", "see [selection]"),
    "dlg": ("dlg_eval", "there is no attack on gradients"), "dlgg": ("dlg_gap", "there is no attack on gradients"),
    "bnpc": ("batch_num_per_client", "there is no attack on gradients"),
    "fd": ("feature_dim", "the model says it"), "mfn": ("models_folder_name", "models are made from the seed"),
    "fs": ("few_shot", "see partition.per_class"), "vs": ("vocab_size", "the model says it"),
    "ml": ("max_len", "the data says it"),
}  # fmt: skip
OF_METHODS = {  # flags of methods that are not here
    "bt": "beta", "K": "K", "M": "M", "itk": "itk", "alk": "alphaK", "sg": "sigma", "al": "alpha", "L": "L",
    "dlr": "dr_learning_rate", "nd": "noise_dim", "glr": "generator_learning_rate", "hd": "hidden_dim", "et": "eta",
    "s": "rand_percent", "lf": "localize_feature_extractor", "p": "layer_idx", "mlr": "mentee_learning_rate",
    "Ts": "T_start", "Te": "T_end", "mo": "momentum", "klw": "kl_weight", "GPath": "generator_path",
    "prompt": "stable_diffusion_prompt", "sbs": "server_batch_size", "gbs": "gen_batch_size", "sfd": "sub_feature_dim",
}  # fmt: skip
WITHOUT |= {short: (long, "it belongs to a method that is not here") for short, long in OF_METHODS.items()}
# Their algorithms: our method, and which of its keys is which flag. A flag that is not given has their default.
ALGORITHMS: dict[str, tuple[str, dict[str, str]]] = {
    "FedAvg": ("fedavg", {}), "Local": ("local", {}), "FedProx": ("fedprox", {"mu": "mu"}), "FedPer": ("fedper", {}),
    "FedRep": ("fedrep", {"head_epochs": "pls"}), "FedROD": ("fedrod", {}),
    "Ditto": ("ditto", {"lam": "mu", "personal_epochs": "pls"}),
    "FedProto": ("fedproto", {"lam": "lam"}), "MOON": ("moon", {"mu": "mu", "temperature": "tau"}),
    "FedBABU": ("fedbabu", {"tune_epochs": "fte"}), "FedPAC": ("fedpac", {"lam": "lam", "head_lr": "lr"}),
    "FedGH": ("fedgh", {"server_lr": "slr", "server_batch": "lbs"}), "GPFL": ("gpfl", {"lam": "lam", "mu": "mu"}),
    "FedTGP": (
        "fedtgp",
        {"lam": "lam", "server_epochs": "se", "threshold": "mart", "server_lr": "lr", "server_batch": "lbs"},
    ),
}  # fmt: skip
FIXED: dict[str, dict[str, Any]] = {  # what is the same in all of their runs of a method
    "fedproto": {"candidates": "all"}, "fedrep": {"last_head_epochs": 0}, "moon": {"projection": 0},
    "gpfl": {"conditions": "trained", "length": "batch"}, "fedgh": {"scored_by": "newest"},
}  # fmt: skip
OTHERWISE = {  # methods of that name which are something else there
    "FedPCL": "its clients train whole models, fedpcl's a projection on top of a frozen encoder, as in the paper",
}
MODELS_THERE = {"cnn": "cnn_pfllib", "resnet": "resnet18", "resnet18": "resnet18"}
TRUE, FALSE = ("true", "1", "yes"), ("false", "0", "no", "")


class Translated(NamedTuple):
    """An experiment's tables, and what a user should know about them."""

    tables: dict[str, Any]
    notes: list[str]


def translate_pfllib(command: str | Sequence[str], partition: Callable[[str], dict[str, Any]]) -> Translated:
    """The experiment of a command; `partition` gives the [partition] section for the name of a data set."""
    words = shlex.split(command) if isinstance(command, str) else [one for word in command for one in shlex.split(word)]
    given, notes = _flags(_behind_script(words))
    value = {short: given.get(short, usual) for short, (_, usual) in FLAGS.items()}
    name, options = _method(value["algo"], value, given, notes)
    model = _model(value["m"], notes)
    tables: dict[str, Any] = {
        "rounds": _number("gr", value, int), "clients": _number("nc", value, int),
        "participation": _number("jr", value, float), "local_epochs": _number("ls", value, int),
        "batch_size": _number("lbs", value, int), "device": _device(value),
        "drop_last": True,
        "method": {"name": name, **options}, "model": {"name": model},
        "data": {"name": str(value["data"]), "normalize": "none"},
        "partition": partition(str(value["data"])),
        "optimizer": {"lr": _number("lr", value, float), **_decay(value, notes)},
        "evaluate": {"own": _number("eg", value, int), "gm": _number("eg", value, int)},
    }  # fmt: skip
    if new := _number("nnc", value, int):
        tables |= {"held_out_clients": new}
    Experiment.from_dict(tables)  # raises now if the keys do not go together
    return Translated(tables, notes)


def _behind_script(words: Sequence[str]) -> list[str]:
    """The arguments, without those of the shell and of Python."""
    for place, word in enumerate(words):
        if word.rpartition("/")[2] == SCRIPT:
            words = words[place + 1 :]
            break
    for place, word in enumerate(words):  # what a shell does with the output
        if word in ("&", ";", "|", "&&") or word.startswith((">", "2>", "1>")):
            return list(words[:place])
    return list(words)


def _flags(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The given values by short flag, and notes on what has no counterpart."""
    long = {name: short for short, (name, *_) in (WITHOUT | FLAGS).items()} | {"model_family": "m"}
    known = {f"-{short}" for short in FLAGS | WITHOUT} | {f"--{name}" for name in long}
    given: dict[str, str] = {}
    notes: list[str] = []
    unknown = []
    place = 0
    while place < len(words):
        word, equals, value = words[place].partition("=")
        place += 1
        if not word.startswith("-"):
            raise UserError(
                f"{word!r} is not a flag of PFLlib. Give its command as it is: python main.py -data MNIST ..."
            )
        if not equals:
            value = words[place] if place < len(words) else ""
            if not value or (value.startswith("-") and value in known):
                raise UserError(f"{word} has no value. Give its command as it is: {word} VALUE.")
            place += 1
        short = long.get(word[2:], "") if word.startswith("--") else word[1:]
        if word not in known:
            unknown.append(word)
        elif short in WITHOUT:
            notes.append(f"{word} {value} has no counterpart: {WITHOUT[short][1]}")
        else:
            given[short] = value
    if unknown:
        raise UserError(
            f"{', '.join(unknown)}: no flag of PFLlib's main.py, nor of HtFLlib's.{_nearest(unknown[0], known)} Leave "
            "out what is not, or correct it."
        )
    return given, notes


def _nearest(word: str, known: Iterable[str]) -> str:
    """A question, where something is near."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    return f" Did you mean {near[0]} for {word}?" if near else ""


def _method(
    algorithm: str, value: Mapping[str, Any], given: Mapping[str, str], notes: list[str]
) -> tuple[str, dict[str, Any]]:
    """Our method and its keys."""
    if algorithm in OTHERWISE:
        raise UserError(
            f"-algo {algorithm} has no counterpart here: {OTHERWISE[algorithm]}. Write an experiment with method = "
            f"{algorithm.lower()}, or import a command of another method."
        )
    if algorithm not in ALGORITHMS:
        raise UserError(
            f"-algo {algorithm} has no counterpart here.{_nearest(algorithm, ALGORITHMS)} Import a command of "
            f"{', '.join(ALGORITHMS)}, or write the method: docs/own-method.md."
        )
    name, keys = ALGORITHMS[algorithm]
    types = fields(METHODS[name])
    options: dict[str, Any] = {}
    if name == "fedgh" and ("se" in given or str(value["m"]).startswith("Ht")):  # HtFLlib's; PFLlib's takes one pass
        keys = keys | {"server_epochs": "se"}
    for key, flag in keys.items():
        options[key] = _number(flag, value, type(types[key][1]))
    unused = [flag for flag in given if flag in ("lam", "mu", "tau", "pls", "fte", "slr", "se", "mart", "lrp")]
    for flag in unused:
        if flag not in keys.values():
            notes.append(f"-{flag} {given[flag]} has no effect on {algorithm} there, and is left out")
    weighted = {"weighting": "samples"} if "weighting" in types else {}  # as all of their servers do
    return name, options | weighted | FIXED.get(name, {})


def _model(name: str, notes: list[str]) -> str:
    """Our model of that name, or the closest one."""
    found = MODELS_THERE.get(str(name).lower())
    if found is None:
        notes.append(
            f"-m {name} has no counterpart: model.name = cnn_pfllib is put in its place; choose one that fits, or a "
            "list, which deals several architectures to the clients"
        )
        return "cnn_pfllib"
    if found == "resnet18":
        notes.append(f"-m {name}: resnet18 here is made for small images, torchvision's there for large ones")
    return found


def _decay(value: Mapping[str, Any], notes: list[str]) -> dict[str, float]:
    """The decay of the step size. `type=bool` there makes any text true, even False."""
    said = value["ld"]
    if said is False:
        return {}
    if said.lower() in FALSE:
        notes.append(f"-ld {said} is taken as no decay; in PFLlib, whose flag has type=bool, it switches the decay on")
        return {}
    if said.lower() not in TRUE:
        raise UserError(f"-ld {said} should be True or False. Correct it.")
    return {"lr_decay": _number("ldg", value, float)}


def _device(value: Mapping[str, Any]) -> str:
    if value["dev"] not in ("cpu", "cuda"):
        raise UserError(f"-dev {value['dev']} should be cpu or cuda. Correct it.")
    return "cpu" if value["dev"] == "cpu" else "auto"


def _number(flag: str, value: Mapping[str, Any], kind: Callable[[Any], Any]) -> Any:
    try:
        return kind(value[flag])
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise UserError(f"-{flag} {value[flag]} should be {wanted}. Correct it.") from None
