"""Taking a round's messages to the other ranks, at once or in the background.

Shapes: W ranks, B bytes in a segment's message.
"""

from torch import Tensor
from torch.autograd.profiler import record_function

from demopt.errors import ExchangeError
from demopt.exchange import Background
from demopt.optim.meeting import Meeting
from demopt.optim.routes.interface import Route
from demopt.optim.segment import Round
from demopt.optim.terms import Terms
from demopt.wire import frame


class Courier:
    """Brings back what all ranks make of each segment's message.

    Example:
        >>> from demopt.optim.options import Options
        >>> meeting, terms = Meeting(None), Terms(Options("auto", 100, 0, 0), [], {})
        >>> meeting.agree([], None, terms)
        >>> Courier(meeting).results(Round([], [], (0, 0)), [], [], terms)
        []
    """

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._background = Background()

    def start(self, begun: Round, number: int, route: Route) -> None:
        """The exchange of a segment begins, in the background."""
        sending, header = begun.sendings[number], begun.headers[number]
        assert sending is not None
        message = sending.message
        sending.arriving = self._background.submit(lambda: self._travel(route, message, header))

    def results(self, begun: Round, routes: list[Route], messages: list[Tensor], terms: Terms) -> list[Tensor]:
        """What all ranks make of the messages [B] of each segment, for its route to apply; waits for what was begun."""
        try:
            self.agree(begun, routes, terms)
            results = []
            for route, message, header, sending in zip(routes, messages, begun.headers, begun.sendings, strict=True):
                if sending and sending.arriving:
                    with record_function("demopt.wait"):
                        results.append(sending.arriving.result())
                else:
                    results.append(self._travel(route, message, header))
            if any(frame.announced(result) for result in results):  # by another rank: once settings have been
                self._meeting.handshake(terms)  # compared, the round is made anew
                rounds = zip(routes, messages, begun.headers, strict=True)
                results = [self._travel(*each) for each in rounds]
        except ExchangeError as error:
            raise ExchangeError(f"step {begun.headers[0].step}: {error}") from error
        return results

    def agree(self, begun: Round, routes: list[Route], terms: Terms) -> None:
        """The handshake, where there is need of one; its bytes are not the step's."""
        if not self._meeting.agreed(routes):
            self._meeting.agree(routes, begun.headers[0], terms)
            begun.started = self._meeting.meter.bytes_so_far

    def _travel(self, route: Route, message: Tensor, header: frame.Header) -> Tensor:
        with record_function("demopt.exchange"):
            return route.exchange(message, self._meeting.meter, header)
