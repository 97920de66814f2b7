"""Teams of threads that walk over the tokens together.

The members of a team take the same steps, and step s of a member reads what all members wrote in
their steps s - 1. So members write into two arrays in turn.

A member is not a thread. A free thread claims a member whose next step is due, takes the step, and
gives the member back before it waits for the others. If a step of another member is due and no
thread takes it, because its thread has not come or does not run at the moment, this thread does. So
one thread alone completes the walk, and a machine with other work delays it little.

The progress of a member is a 64-bit integer: twice the number of its steps that are done, plus 1
while a thread takes the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # llvmlite is loaded when a kernel is compiled
    from effattn.llvm.codegen import Code

LINE = 16  # float32 in a cache line; the progress of each member has a line of its own
_LOOKS = 30  # looks at a step that nobody takes, before this thread does
_PATIENCE = 1000  # looks before this thread offers its core to another


class Team(NamedTuple):
    """A team in the memory that its threads share.

    Attributes:
      progress: address of `members` cache lines, at first zero.
      members: number of members.
      steps: number of steps of each member.
    """

    progress: Any
    members: Any
    steps: Any

    def line(self, code: Code, member: Any) -> Any:
        """Address of the progress of a member."""
        return code.address(self.progress, code.mul(member, LINE))

    def load(self, code: Code, member: Any) -> Any:
        """The progress of a member; what its steps wrote is visible to this thread."""
        place = self.line(code, member)
        return code.builder.load_atomic(place, "acquire", 8, typ=code.int64)

    def claim(self, code: Code, member: Any, steps: Any) -> Any:
        """Claims a member with this number of done steps, if no thread has it; returns whether."""
        free = code.mul(steps, 2)
        claimed = code.add(free, 1)
        place = self.line(code, member)
        found = code.builder.cmpxchg(place, free, claimed, "acquire", "monotonic")
        return code.builder.extract_value(found, 1)

    def finish_step(self, code: Code, member: Any) -> None:
        """Publishes the step of a member that this thread has claimed, and gives it back."""
        code.builder.atomic_rmw("add", self.line(code, member), code.integer(1), "release")

    def behind(self, code: Code, step: Any) -> tuple[Any, Any]:
        """Returns whether any members have done fewer steps, and whether one of these is free."""
        builder = code.builder
        late, unclaimed = code.variable(code.false()), code.variable(code.false())
        with code.loop(0, self.members) as other:
            progress = self.load(code, other)
            is_late = code.less(code.div(progress, 2), step)
            is_free = builder.icmp_signed("==", code.rem(progress, 2), code.integer(0))
            code.set(late, builder.or_(code.get(late), is_late))
            found = builder.and_(is_late, is_free)
            code.set(unclaimed, builder.or_(code.get(unclaimed), found))
        return code.get(late), code.get(unclaimed)


def join(code: Code, team: Team, first: Any, run: Callable[[Any], None]) -> None:
    """Generates the work of a thread for a team, until all members have done all steps.

    Args:
      code: the function of the thread.
      team: the team.
      first: the member that the thread looks at first.
      run: generates a call, for a claimed member, of the function with the code of `take_steps`.
    """
    builder = code.builder
    head, pause, end = (builder.append_basic_block(name) for name in ("look", "pause", "end"))
    looks = code.variable(0)
    builder.branch(head)
    builder.position_at_end(head)
    is_left = code.variable(code.false())
    with code.loop(0, team.members) as n:
        member = code.rem(code.add(first, n), team.members)
        progress = team.load(code, member)
        done = code.div(progress, 2)
        has_steps = code.less(done, team.steps)
        code.set(is_left, builder.or_(code.get(is_left), has_steps))
        with code.when(has_steps):
            late, _ = team.behind(code, done)
            with code.when(builder.not_(late)), code.when(team.claim(code, member, done)):
                run(member)
                code.set(looks, 0)
    builder.cbranch(code.get(is_left), pause, end)
    builder.position_at_end(pause)
    _pause(code, looks)
    builder.branch(head)
    builder.position_at_end(end)


def take_steps(code: Code, team: Team, member: Any, step: Callable[[Any], None]) -> None:
    """Generates the steps of a claimed member.

    The thread leaves the member when all steps of the member are done, when another thread claims
    the member, or when a due step of another member has stayed unclaimed for more than `_LOOKS`
    looks.

    Args:
      code: the function of the member.
      team: the team.
      member: the member, whose next step is due and claimed by this thread.
      step: generates the code of a step, given its number.
    """
    builder = code.builder
    names = "step", "next", "look", "claim", "wait", "pause", "leave"
    blocks = {name: builder.append_basic_block(name) for name in names}
    done = code.variable(code.div(team.load(code, member), 2))
    looks, unclaimed_looks = code.variable(0), code.variable(0)
    builder.branch(blocks["step"])
    builder.position_at_end(blocks["step"])
    step(code.get(done))
    team.finish_step(code, member)
    code.set(done, code.add(code.get(done), 1))
    builder.cbranch(code.less(code.get(done), team.steps), blocks["next"], blocks["leave"])
    builder.position_at_end(blocks["next"])
    code.set(looks, 0)
    code.set(unclaimed_looks, 0)
    builder.branch(blocks["look"])
    builder.position_at_end(blocks["look"])
    late, unclaimed = team.behind(code, code.get(done))
    builder.cbranch(late, blocks["wait"], blocks["claim"])
    builder.position_at_end(blocks["claim"])
    claimed = team.claim(code, member, code.get(done))
    builder.cbranch(claimed, blocks["step"], blocks["leave"])
    builder.position_at_end(blocks["wait"])
    more = builder.zext(unclaimed, code.int64)
    code.set(unclaimed_looks, code.add(code.get(unclaimed_looks), more))
    is_enough = code.less(_LOOKS, code.get(unclaimed_looks))
    builder.cbranch(is_enough, blocks["leave"], blocks["pause"])
    builder.position_at_end(blocks["pause"])
    _pause(code, looks)
    builder.branch(blocks["look"])
    builder.position_at_end(blocks["leave"])


def _pause(code, looks):
    """Lets the processor save power for a moment; after many looks, lets other threads run."""
    code.pause()
    code.set(looks, code.add(code.get(looks), 1))
    with code.when(code.less(_PATIENCE, code.get(looks))):
        code.call("sched_yield")
