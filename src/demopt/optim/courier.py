"""Exchanges a round's messages with the other ranks, at once or in the background.

Shapes: W ranks, B bytes in a bucket's message.
"""

from torch import Tensor
from torch.autograd.profiler import record_function

from demopt.errors import ExchangeError
from demopt.exchange import Background
from demopt.optim.bucket import Round
from demopt.optim.meeting import Meeting
from demopt.optim.routes.interface import Route
from demopt.optim.terms import Terms
from demopt.wire import frame


class Courier:
    """Sends each bucket's message on its route and returns the result.

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
        """Starts the exchange of a bucket in the background."""
        sending, header = begun.sendings[number], begun.headers[number]
        assert sending is not None
        message = sending.message
        sending.arriving = self._background.submit(lambda: self._travel(route, message, header))

    def results(self, begun: Round, routes: list[Route], messages: list[Tensor], terms: Terms) -> list[Tensor]:
        """Returns the exchange's result for each bucket's message [B]; waits for exchanges that `start` has begun."""
        try:
            self.agree(begun, routes, terms)
            results = []
            for route, message, header, sending in zip(routes, messages, begun.headers, begun.sendings, strict=True):
                if sending and sending.arriving:
                    with record_function("demopt.wait"):
                        results.append(sending.arriving.result())
                else:
                    results.append(self._travel(route, message, header))
            if any(frame.announced(result) for result in results):  # another rank has a new layout:
                self._meeting.handshake(terms)  # compare settings, then repeat the round
                rounds = zip(routes, messages, begun.headers, strict=True)
                results = [self._travel(*each) for each in rounds]
        except ExchangeError as error:
            raise ExchangeError(f"step {begun.headers[0].step}: {error}") from error
        return results

    def agree(self, begun: Round, routes: list[Route], terms: Terms) -> None:
        """Runs the handshake if the routes are new; its bytes do not count as the step's."""
        if not self._meeting.agreed(routes):
            self._meeting.agree(routes, begun.headers[0], terms)
            begun.started = self._meeting.meter.bytes_so_far

    def _travel(self, route: Route, message: Tensor, header: frame.Header) -> Tensor:
        with record_function("demopt.exchange"):
            return route.exchange(message, self._meeting.meter, header)
