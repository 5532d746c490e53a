/* delay_box ONE OTHER MILLISECONDS: hands every Ethernet frame that comes in on interface ONE out on OTHER, and the
 * other way round, each frame that many milliseconds late and in order.
 *
 * Packet sockets carry a virtio header before each frame. With it the kernel passes frames on as they are: larger than
 * the MTU, to be cut by the next device, and with a checksum that is still to be filled in.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <arpa/inet.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { LARGEST = 1 << 17, AT_ONCE = 64 };
static const size_t MOST_WAITING = 256u << 20; /* bytes in one direction; more is dropped, as a router would */
static const int SOCKET_BUFFER = 32 << 20;

struct frame {
  struct frame *next;
  int64_t due;
  size_t size;
  unsigned char bytes[];
};

struct direction {
  int from, to;
  struct frame *first, **end;
  size_t waiting;
};

static int64_t nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static void must(int result, const char *what) {
  if (result >= 0) return;
  fprintf(stderr, "delay_box: %s: %s\n", what, strerror(errno));
  exit(1);
}

static int open_interface(const char *name) {
  int on = 1, file = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK, 0);
  must(file, "packet socket");
  struct sockaddr_ll address = {.sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL)};
  address.sll_ifindex = (int)if_nametoindex(name);
  must(address.sll_ifindex ? 0 : -1, name);
  struct packet_mreq all = {.mr_ifindex = address.sll_ifindex, .mr_type = PACKET_MR_PROMISC};
  must(setsockopt(file, SOL_PACKET, PACKET_VNET_HDR, &on, sizeof on), "virtio headers");
  must(setsockopt(file, SOL_PACKET, PACKET_IGNORE_OUTGOING, &on, sizeof on), "incoming frames only");
  must(setsockopt(file, SOL_PACKET, PACKET_ADD_MEMBERSHIP, &all, sizeof all), "frames for all addresses");
  must(setsockopt(file, SOL_SOCKET, SO_RCVBUFFORCE, &SOCKET_BUFFER, sizeof SOCKET_BUFFER), "receive buffer");
  must(setsockopt(file, SOL_SOCKET, SO_SNDBUFFORCE, &SOCKET_BUFFER, sizeof SOCKET_BUFFER), "send buffer");
  must(bind(file, (struct sockaddr *)&address, sizeof address), name);
  return file;
}

/* Takes in what has arrived. */
static void take(struct direction *way, int64_t delay) {
  static unsigned char buffer[LARGEST];
  for (int count = 0; count < AT_ONCE; count++) {
    ssize_t size = recv(way->from, buffer, sizeof buffer, 0);
    if (size <= 0) return;
    if (way->waiting + (size_t)size > MOST_WAITING) continue;
    struct frame *frame = malloc(sizeof *frame + (size_t)size);
    if (!frame) continue;
    *frame = (struct frame){.due = nanoseconds() + delay, .size = (size_t)size};
    memcpy(frame->bytes, buffer, (size_t)size);
    *way->end = frame;
    way->end = &frame->next;
    way->waiting += frame->size;
  }
}

/* Hands out what is due; returns the nanoseconds until the next frame is, at most a second. */
static int64_t hand_out(struct direction *way) {
  for (struct frame *frame; (frame = way->first);) {
    int64_t left = frame->due - nanoseconds();
    if (left > 0) return left < 1000000000 ? left : 1000000000;
    (void)!send(way->to, frame->bytes, frame->size, 0); /* a full queue drops the frame, as a router would */
    way->first = frame->next;
    if (!way->first) way->end = &way->first;
    way->waiting -= frame->size;
    free(frame);
  }
  return 1000000000;
}

int main(int count, char **words) {
  if (count != 4) {
    fputs("usage: delay_box ONE OTHER MILLISECONDS\n", stderr);
    return 2;
  }
  prctl(PR_SET_PDEATHSIG, SIGKILL); /* a laboratory that is killed leaves no box behind */
  /* A cable does not wait for its turn on a busy processor. */
  must(sched_setscheduler(0, SCHED_FIFO, &(struct sched_param){.sched_priority = 1}), "real-time priority");
  int one = open_interface(words[1]), other = open_interface(words[2]);
  int64_t delay = (int64_t)(atof(words[3]) * 1e6);
  struct direction ways[2] = {{.from = one, .to = other}, {.from = other, .to = one}};
  for (int i = 0; i < 2; i++) ways[i].end = &ways[i].first;
  puts("ready");
  fflush(stdout);
  for (;;) {
    int64_t first = hand_out(&ways[0]), second = hand_out(&ways[1]), left = first < second ? first : second;
    struct pollfd files[2] = {{.fd = one, .events = POLLIN}, {.fd = other, .events = POLLIN}};
    struct timespec wait = {.tv_sec = left / 1000000000, .tv_nsec = left % 1000000000};
    must(ppoll(files, 2, &wait, NULL), "poll");
    for (int i = 0; i < 2; i++)
      if (files[i].revents) take(&ways[i], delay);
  }
}
