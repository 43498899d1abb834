"""Class names of well-known data sets whose files have only numbers, and their superclasses."""

import re
from pathlib import Path

CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
FASHION = "T-shirt/top Trouser Pullover Dress Coat Sandal Shirt Sneaker Bag Ankle_boot"
PACS = "dog elephant giraffe guitar horse house person"
OFFICE = (
    "backpack touring_bike calculator headphones computer_keyboard laptop computer_monitor computer_mouse coffee_mug "
    "video_projector"
)
CIFAR100 = {
    "aquatic mammals": "beaver dolphin otter seal whale",
    "fish": "aquarium_fish flatfish ray shark trout",
    "flowers": "orchid poppy rose sunflower tulip",
    "food containers": "bottle bowl can cup plate",
    "fruit and vegetables": "apple mushroom orange pear sweet_pepper",
    "household electrical devices": "clock keyboard lamp telephone television",
    "household furniture": "bed chair couch table wardrobe",
    "insects": "bee beetle butterfly caterpillar cockroach",
    "large carnivores": "bear leopard lion tiger wolf",
    "large man-made outdoor things": "bridge castle house road skyscraper",
    "large natural outdoor scenes": "cloud forest mountain plain sea",
    "large omnivores and herbivores": "camel cattle chimpanzee elephant kangaroo",
    "medium-sized mammals": "fox porcupine possum raccoon skunk",
    "non-insect invertebrates": "crab lobster snail spider worm",
    "people": "baby boy girl man woman",
    "reptiles": "crocodile dinosaur lizard snake turtle",
    "small mammals": "hamster mouse rabbit shrew squirrel",
    "trees": "maple_tree oak_tree palm_tree pine_tree willow_tree",
    "vehicles 1": "bicycle bus motorcycle pickup_truck train",
    "vehicles 2": "lawn_mower rocket streetcar tank tractor",
}
SUPERCLASS = {name: group for group, names in CIFAR100.items() for name in names.split()}
KNOWN = {  # the start of a file's name, and its classes in label order
    r"cifar_?100": " ".join(sorted(SUPERCLASS)),
    r"cifar_?10": CIFAR10,
    r"fashion_?mnist|fmnist": FASHION,
    r"pacs": PACS,
    r"office_?caltech": OFFICE,
}


def class_names(source: str, given: tuple[str, ...]) -> list[str]:
    """A source's class names; if these are numbers, the known class names of a data set of this name."""
    numbers = tuple(str(number) for number in range(len(given)))
    stem = Path(source.rpartition(":")[2]).stem.lower().replace("-", "_")
    for pattern, words in KNOWN.items():
        names = [word.replace("_", " ") for word in words.split()]
        if given == numbers and re.match(pattern, stem) and len(names) == len(given):
            return names
    return list(given)


def official_superclasses(names: list[str]) -> list[str] | None:
    """The official superclass of each CIFAR-100 class; None for other data sets."""
    found = [SUPERCLASS.get(name.lower().replace(" ", "_")) for name in names]
    return [group for group in found if group] if len(names) == len(SUPERCLASS) and all(found) else None
