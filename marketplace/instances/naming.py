"""Names for instances that were given none."""

from __future__ import annotations

from marketplace.store.ids import Random

_HOW_TEXT = (
    "abaft able amber ample apt arch ashen astir avid awake azure bold brave brisk calm civil clear cool crisp deft "
    "early eager even fair fast fine firm fleet fond frank free fresh glad gold grand keen kind lean light live loyal "
    "lucid major merry mild neat noble open plain prime proud quick quiet rapid ready rich ripe rosy sane sharp sleek "
    "smart snug solid sound stark still stout sunny sure swift tame tidy true vast vivid warm wise witty young zesty"
)
_WHO_TEXT = (
    "adder auk bat bear bee bison boar bream carp cat clam cod colt coot cow crab crane crow cub deer dingo dove duck "
    "eagle eel egret elk emu ewe finch fox frog gecko gnu goat goose grebe gull hare hawk hen heron hound ibex ibis "
    "jay kite kiwi koala lark lemur lion llama loon lynx macaw mink mole moose moth mouse mule newt okapi orca otter "
    "owl ox panda perch pike pony puma quail ram rat raven robin rook seal shad shrew skunk sloth snail snipe stag "
    "stoat stork swan swift tapir tern tiger toad trout tuna vole wasp whale wolf wren yak zebra"
)
_HOW, _WHO = _HOW_TEXT.split(), _WHO_TEXT.split()


def new_name(random: Random) -> str:
    """A name that people can say, like abaft-yak-4159."""
    how, who, number = random(1)[0], random(1)[0], int.from_bytes(random(2), "big")
    return f"{_HOW[how % len(_HOW)]}-{_WHO[who % len(_WHO)]}-{number % 9000 + 1000}"
