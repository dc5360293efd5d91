import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.List;
import java.util.stream.Collectors;

/** The JDK's HTTP client, which offers HTTP/2 by an upgrade unless it is told not to. Arguments: URL, model. */
public class JdkClient {
    public static void main(String[] args) throws Exception {
        for (HttpClient.Version version : HttpClient.Version.values()) {
            HttpClient client = HttpClient.newBuilder().version(version).build();
            HttpRequest.Builder models = HttpRequest.newBuilder(URI.create(args[0] + "/v1/models/" + args[1]));
            expect(version + " GET", 200, client.send(models.GET().build(), HttpResponse.BodyHandlers.ofString()));
            for (boolean stream : List.of(false, true)) {
                String body = "{\"model\": \"" + args[1] + "\", \"prompt\": \"One two\", \"max_tokens\": 4, \"stream\": " + stream + "}";
                HttpRequest request = HttpRequest.newBuilder(URI.create(args[0] + "/v1/completions"))
                    .header("content-type", "application/json")
                    .POST(HttpRequest.BodyPublishers.ofString(body)).build();
                for (int turn = 0; turn < 2; turn++) {  // the second one on the connection of the first
                    HttpResponse<java.util.stream.Stream<String>> response = client.send(request, HttpResponse.BodyHandlers.ofLines());
                    List<String> lines = response.body().collect(Collectors.toList());
                    expect(version + " POST stream=" + stream, 200, response);
                    if (stream && !lines.contains("data: [DONE]")) throw new AssertionError(lines);
                }
            }
        }
    }

    private static void expect(String what, int status, HttpResponse<?> response) {
        System.out.println(what + ": " + response.statusCode() + " " + response.version());
        if (response.statusCode() != status) throw new AssertionError(what + ": " + response.statusCode() + " " + response.body());
    }
}
